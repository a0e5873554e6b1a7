"""Samples in shards: local or remote files with a known number of samples."""
