"""What a deployment is: frozen records, presets (.toml), loading and validation. Standard
library only."""
