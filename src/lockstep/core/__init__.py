"""One training, on any number of ranks. This folder imports no other folder of the package."""
