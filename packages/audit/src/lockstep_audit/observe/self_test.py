"""`python -m lockstep_audit.observe.self_test`: checks that each patch works with the installed packages."""

import sys

import torch

from lockstep_audit.observe import torch_private


def main() -> int:
    """Print the patches that do not work."""
    failed = torch_private.failing()
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    print(f"torch {torch.__version__}: {len(failed)} of {torch_private.count()} patches do not work")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
