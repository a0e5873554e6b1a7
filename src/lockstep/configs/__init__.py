"""From a recipe, a file or a class to the config of a run."""
