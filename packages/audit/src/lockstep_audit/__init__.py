"""What is silently wrong in a distributed PyTorch training script: the command `lockstep-audit`.

Scripts of any framework run unchanged. The package needs torch and nothing else.
"""

__version__ = "0.1.0"  # that of torch-lockstep: tests/test_package.py compares them
