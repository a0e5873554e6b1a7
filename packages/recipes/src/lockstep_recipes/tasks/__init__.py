"""The tasks of the recipes."""
