"""Finders for data sets of images: each file has those of one kind."""
