"""`lockstep plan`: what a training needs of GPUs, before one is paid for.

Only `facts.py`, `model.py`, `trace.py`, `command.py` and `measure.py` need torch.
"""
