"""Checks, plans, reports and searches: what reads runs of Lockstep, or starts trainings to judge them."""

__version__ = "0.1.0"
