"""Trainings on several machines: job files for schedulers, and a start through ssh."""
