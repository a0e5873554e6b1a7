"""The global random number generators: looking at them, and putting them into states that no training is in."""

from __future__ import annotations

import random

import numpy as np
import torch


def states() -> dict[str, str]:
    """The state of every source of random numbers that can be looked at."""
    on_gpus = [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    torch_state = repr([torch.get_rng_state().tolist(), on_gpus])
    return {
        "torch": torch_state,
        "Python's random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),
    }


def disturb(number: int) -> None:
    """Put the generators into a state that belongs to `number`. Where all draws are seeded, this changes nothing."""
    random.seed(f"disturbed {number}")
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(63))
