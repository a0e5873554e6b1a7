"""A mesh of ranks: models whose layers are cut over neighbouring ranks (`parallel.tensor`)."""
