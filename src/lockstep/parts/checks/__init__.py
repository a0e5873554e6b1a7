"""Faults of a task, its data or its model are found before the first step, or right after it."""
