"""The commands. They share their options, the start of ranks, and the way that errors become messages."""
