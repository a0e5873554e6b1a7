"""The commands, each in a file of the same name. They share their options, the start of ranks, and how errors become
messages."""
