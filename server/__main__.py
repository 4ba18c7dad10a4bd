"""`python -m octavo.server`: the `octavo` command where no console script is on PATH."""

import sys

from .main import main

sys.exit(main())
