"""Processes and machines: ranks are started, watched and restarted."""
