"""The formats of shards: how samples are counted, and how a block of them is read."""
