"""Readers that tasks of several kinds share."""
