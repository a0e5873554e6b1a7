"""Pages that show a run or compare runs: self-contained HTML files."""
