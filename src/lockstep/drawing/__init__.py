"""Images as arrays, and diagrams as SVG."""
