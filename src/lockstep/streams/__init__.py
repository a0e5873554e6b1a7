"""Training data that can only be read sequentially."""
