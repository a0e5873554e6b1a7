"""A recipe's code is one file."""
