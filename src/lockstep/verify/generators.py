"""The global random number generators of torch, NumPy and Python: read their states, or change them."""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep import devices


def states() -> dict[str, str]:
    """The state of each generator, by its name, as text that can be compared."""
    torch_state = repr([state.tolist() for state in (torch.get_rng_state(), *devices.generators_of_gpus())])
    return {
        "torch": torch_state,
        "Python's random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),
    }


def disturb(number: int) -> None:
    """Put all generators into a state that belongs to `number`. A training that seeds all its draws does not notice."""
    random.seed(f"disturbed {number}")
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(63))
