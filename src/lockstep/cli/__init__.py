"""The commands. They share their options, the start of ranks, and how errors become messages."""
