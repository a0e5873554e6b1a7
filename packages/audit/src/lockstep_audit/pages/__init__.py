"""The pages of the rules: links to docs/audit, which a built package has as files."""
