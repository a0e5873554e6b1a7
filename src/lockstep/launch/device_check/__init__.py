"""Known answers: what a device computes, stores and exchanges, compared with the correct result."""
