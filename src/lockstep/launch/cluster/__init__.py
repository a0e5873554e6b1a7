"""Trainings on several machines: the texts that schedulers read, and a start through ssh."""
