"""Finders for texts and their labels: each file has those of one kind."""
