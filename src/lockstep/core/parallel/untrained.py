"""Leaf tensors that get a gradient and are in no optimizer, such as the weights of a loss that the task keeps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep.core.code_files import is_own_code
from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel.held_parameters import trainable_leaves

_ENGINE = ("lockstep.trainer.", "lockstep.core.")
_OUTSIDE = (
    "make it a part of the model (for a loss with parameters: nn.ModuleDict({'net': net, 'criterion': criterion})); or "
    "freeze it: requires_grad_(False). If only a derivative by it is needed, such as by points of a grid, make it in "
    "each pass: x.detach().requires_grad_()"
)
_IN_MODEL = (
    "create all parameters in the model's constructor, as nn.Parameter, and keep layers in an nn.ModuleList: the "
    "optimizer has the parameters that the model has then"
)


class UntrainedLeaves:
    """Looks at the first two steps of a process.

    A leaf that the losses reach may be new in each pass, such as the input of a gradient penalty. So it must have
    existed before the first pass, or the second step must reach the same object.

    What the graph of the losses does not show is found by its gradient, if `holders` lead to it: leaves that are used
    in `torch.utils.checkpoint` with use_reentrant=True, or in a `torch.autograd.Function` without being arguments.

    Args:
        holders: gives the objects, by name, that may hold such leaves.
    """

    def __init__(self, holders: Callable[[], Mapping[str, Any]]) -> None:
        self.holders = holders
        self._left = 2  # steps that are still to be looked at
        self._held: dict[int, tuple[str, Tensor]] = {}  # by `id`: leaves that existed before the first pass
        self._before: dict[int, Any] = {}  # by `id`: marks of their gradients
        self._reached: list[weakref.ref[Tensor]] = []  # unknown leaves of the first step

    def begin(self, own: set[int]) -> None:
        """Before the passes of a step.

        Args:
            own: `id` of the leaves that the optimizer has.
        """
        if self._left == 2:
            self._held = trainable_leaves(self.holders(), own)

    def check_graph(self, leaves: Iterable[Tensor], own: set[int]) -> None:
        """Before the last backward pass of a step.

        Args:
            leaves: those that the losses of the pass reach.
            own: see `begin`.

        Raises:
            TrainingError: names the leaves that would get a gradient in vain.
        """
        self._left -= 1
        unknown = [leaf for leaf in leaves if leaf.requires_grad and id(leaf) not in own]
        self._refuse([leaf for leaf in unknown if id(leaf) in self._held or self._is_known(leaf)])
        self._reached = [weakref.ref(leaf) for leaf in unknown]
        self._before = {key: _mark(leaf) for key, (_, leaf) in self._held.items() if key not in own}

    def check_gradients(self) -> bool:
        """After this backward pass. True if no further step must be looked at.

        Raises:
            TrainingError: names the leaves that got a gradient that the graph did not show.
        """
        self._refuse([self._held[key][1] for key, mark in self._before.items() if _mark(self._held[key][1]) != mark])
        self._held, self._before = {}, {}
        return not self._left or not self._reached

    def _is_known(self, leaf: Tensor) -> bool:
        return any(one() is leaf for one in self._reached)

    def _refuse(self, leaves: list[Tensor]) -> None:
        if not leaves:
            return
        names = self._held or trainable_leaves(self.holders(), set())
        shown = [names[id(one)][0] if id(one) in names else f"a tensor of shape {tuple(one.shape)}" for one in leaves]
        in_model = any(one.startswith("model.") for one in shown)
        gets = "gets a gradient and is" if len(shown) == 1 else "get a gradient and are"
        raise TrainingError(
            f"{listed(shown, 5)} {gets} in no optimizer, so that it would never train",
            where="Task.loss",
            remedy=_IN_MODEL if in_model else _OUTSIDE,
        )


def variables_of_task(task: Any) -> dict[str, Any]:
    """The task, and the variables of the user's own module that its loss is from."""
    inside = getattr(task, "task", None)  # the tasks that `lockstep verify` wraps
    task = inside if hasattr(inside, "train_data") else task
    loss = getattr(task.loss, "__func__", task.loss)
    code = getattr(loss, "__code__", None)
    variables = loss.__globals__ if code is not None and is_own_code(code.co_filename) else {}
    return {"Task": task} | {name: value for name, value in variables.items() if name != "Task"}  # the class


def variables_of_script() -> dict[str, Any]:
    """The variables of the innermost function on the stack that is a user's own code, and of its module.

    Left out are the objects of Lockstep itself.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_own_code(frame.f_code.co_filename):
        frame = frame.f_back
    found = {**frame.f_globals, **frame.f_locals}
    return {name: value for name, value in found.items() if not type(value).__module__.startswith(_ENGINE)}


def _mark(leaf: Tensor) -> Any:
    """Something that differs after a gradient was added."""
    return None if leaf.grad is None else (id(leaf.grad), leaf.grad._version)
