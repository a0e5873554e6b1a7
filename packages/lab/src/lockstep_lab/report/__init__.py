"""Pages that show a run or compare runs: HTML files that load no other file."""
