"""States on the disk, absent or complete: `state` takes and gives them, `saver` and `files` write, `store` commits."""
