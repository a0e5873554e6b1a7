"""Guests of a training that do not change its result: logs, images, measurements."""
