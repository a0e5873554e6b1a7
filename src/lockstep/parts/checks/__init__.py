"""Checks that find faults of a task, its data or its model before the first step, or right after it."""
