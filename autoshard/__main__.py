"""Run the command line with `python -m autoshard`; see `autoshard.cli.main`."""

from __future__ import annotations

import sys

from autoshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
