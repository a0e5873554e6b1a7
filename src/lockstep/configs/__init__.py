"""`config_file.py` builds a config from a recipe, a file and KEY=VALUE; `registry.py` finds tasks and recipes by name.
The folder `presets/` has YAML files for kinds of machines."""
