"""Samples in shards, local or remote: how they are found, counted, read by block, ordered and written. `formats/` has a
file for each format."""
