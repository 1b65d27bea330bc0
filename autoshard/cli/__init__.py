"""The command line: `python -m autoshard plan | recipes | show | ...`."""
