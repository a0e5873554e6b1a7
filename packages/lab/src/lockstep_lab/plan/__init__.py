"""`lockstep plan`: how many GPUs, and how much of them, a training needs, before you pay for them.

Only `facts.py`, `model.py`, `trace.py`, `command.py` and `measure.py` need torch.
"""
