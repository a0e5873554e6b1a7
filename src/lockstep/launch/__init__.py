"""Processes and machines: ranks are started, watched and started again."""
