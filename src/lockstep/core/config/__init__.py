"""The config of a run: its sections, and how recipes, files and the command line become a config."""
