"""`lockstep plan`: what a training needs of GPUs, before one is paid for. Only `facts.py` and `trace.py` need torch."""
