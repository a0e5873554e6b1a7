"""CT volumes: reading, Hounsfield units, windows, slices, the cache."""
