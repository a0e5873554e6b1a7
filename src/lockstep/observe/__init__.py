"""Logs, predictions and summaries: this package receives values of a training and never changes them."""
