"""Samples that can only be read one after the other, as training data."""
