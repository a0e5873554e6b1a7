"""Checks, plans, reports and searches: tools that read Lockstep runs, or start trainings to judge them."""

__version__ = "0.1.0"
