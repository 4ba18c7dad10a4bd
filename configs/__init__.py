"""What a deployment is: frozen records, presets (.toml), loading, validation. No dependencies."""
