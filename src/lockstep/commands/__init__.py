"""Commands that need little of the command line: each module adds its own to the application."""
