"""Samples that are read one after the other, as data with positions; the Part that keeps the position."""
