"""Absent or complete."""
