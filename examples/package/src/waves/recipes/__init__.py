"""Recipes: YAML files."""
