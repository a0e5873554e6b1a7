"""YAML files for tasks, and the embedded data."""
