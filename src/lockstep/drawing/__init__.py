"""Pictures as arrays, and diagrams as SVG."""
