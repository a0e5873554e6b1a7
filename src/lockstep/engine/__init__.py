"""Time and arithmetic: knows no task and no config."""
