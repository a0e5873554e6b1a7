"""The pages of the documentation: links to docs, files in a built package. `lockstep --explain` prints them."""
