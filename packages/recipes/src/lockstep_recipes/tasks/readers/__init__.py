"""Readers that several kinds of tasks share."""
