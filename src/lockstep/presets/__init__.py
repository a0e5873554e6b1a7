"""YAML files that say how a kind of machine runs a training."""
