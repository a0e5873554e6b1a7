"""Known answers: what a device computes, keeps in memory and exchanges, compared with the right result."""
