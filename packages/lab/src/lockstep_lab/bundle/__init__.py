"""One file that holds what one step of a run needs, and the same step made again from this file."""
