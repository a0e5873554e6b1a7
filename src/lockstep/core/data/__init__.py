"""Order is a pure function; samples become batches."""
