"""The config of a run: its sections."""
