"""The global random generators of torch, NumPy and Python: read their states, or change them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.core import devices
from lockstep_lab.verify.step_operations import RandomOperations


def states() -> dict[str, str]:
    """The state of each generator, by its name, as text that can be compared."""
    torch_state = repr([state.tolist() for state in (torch.get_rng_state(), *devices.generators_of_gpus())])
    return {
        "torch": torch_state,
        "Python's random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),
    }


def changed(before: Mapping[str, str]) -> list[str]:
    """Names of the generators whose state differs from that in `states`."""
    return [name for name, state in states().items() if state != before[name]]


def random_operations(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> list[str]:
    """Operations that draw random numbers in a forward pass, and generators other than torch's that it uses."""
    before = states()
    with RandomOperations() as operations, torch.no_grad():
        call(model, batch)
    names = changed(before)
    # Operations such as attention can draw, but do not if their dropout is zero. So the generator decides.
    by_torch = (list(dict.fromkeys(operations.names)) or ["torch"]) if "torch" in names else []
    return [name for name in names if name != "torch"] + by_torch


def drawing_line(predict: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """The first line at which predictions draw random numbers; empty if none, or if they are meant to.

    The mean of several passes is meant to, and so is a line with `training=True`.
    """
    passes: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(None))
    with contextlib.suppress(Exception), torch.no_grad(), RandomOperations() as drawn:
        predict(model, batch)
    handle.remove()
    intended = len(passes) > 1 or any("training=True" in line for line in drawn.lines)
    return "" if intended else next(iter(drawn.places), "")


def disturb(number: int) -> None:
    """Put all generators into a state derived from `number`. A training that seeds all its draws is unaffected."""
    random.seed(f"disturbed {number}")
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(63))
