"""What is silently wrong in a distributed PyTorch training script: the command `lockstep-audit`.

Scripts of any framework run unchanged. The package needs only torch.
"""

__version__ = "0.1.0"  # that of torch-lockstep: tests/test_package.py compares them
