"""A mesh of ranks: models whose layers are sharded over neighbouring ranks (`parallel.tensor`)."""
