"""Samples in shards: files, near or far, whose samples are counted."""
