"""`lockstep-audit`: finds silent faults in distributed PyTorch training scripts.

Scripts of any framework run unchanged. The package requires only torch.
"""

__version__ = "0.1.0"  # same as torch-lockstep: tests/test_package.py compares them
