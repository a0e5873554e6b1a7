"""Watchers: they read, they never steer."""
