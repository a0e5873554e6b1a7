"""What happened in a run: pages that show a run or compare runs, self-contained HTML files."""
