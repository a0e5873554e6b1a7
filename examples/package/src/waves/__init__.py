"""Sine waves, for Lockstep."""
