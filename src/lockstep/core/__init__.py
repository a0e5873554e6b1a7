"""One training on any number of ranks."""
