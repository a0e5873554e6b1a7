"""Runs that released versions have written, which every later version must read. How to add one: `make.py`."""
