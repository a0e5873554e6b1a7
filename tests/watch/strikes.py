"""One flipped bit, at one moment of one step: of a weight, optimizer state, a gradient, an activation or a batch."""

import contextlib
import os
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as modules

from lockstep.core import step as engine
from lockstep.core.data.tensors import map_tensors
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.single import Single
from lockstep.watch import part
from lockstep.watch.part import Watch
from tests.watch.cases import end_of, settings
from tests.watch.faults import _first, flip

RESTING = ("before the step", "in the check", "before the forward", "before the backward", "before the update", "late")
"""The moments of a step at which a number that rests in memory may change: before the checks of this step begin; while
the share of another rank is computed; before and after the forward pass; after the exchange; when a check has ended."""
MOMENTS = {
    "weight": RESTING,
    "optimizer": RESTING,
    "reduced": ("before the update", "at the update", "late"),
    "gradient": ("in the pass",),
    "activation": ("in the pass",),
    "batch": ("before the step", "before the forward"),
}

STRATEGIES = (("ddp", 2), ("fsdp", 2), ("single", 1), ("ddp", 3), ("fsdp", 3))
EVERY, CHECKED, BEFORE, BETWEEN = 5, 10, 9, 7


def cases():
    """Kind, moment and step of each strike: at a check, just before it, and between two checks."""
    for kind, moments in MOMENTS.items():
        for moment in moments:
            yield kind, moment, CHECKED
            if moment in ("before the step", "before the update", "in the pass"):
                yield kind, moment, BEFORE
            if moment in ("before the step", "in the pass"):
                yield kind, moment, BETWEEN


def right_verdict(strategy, kind, moment, step):
    """The verdict that a strike must lead to. None: no check can see it, as docs/watch.md says."""
    is_checked = step == CHECKED
    if kind in ("weight", "optimizer", "reduced"):
        if strategy == "ddp":
            return "link" if kind == "reduced" and is_checked and moment != "late" else "memory"
        return "memory" if is_checked and moment != "before the step" else None
    if not is_checked or (strategy, kind, moment) == ("single", "batch", "before the step"):
        return None
    return "data" if (kind, moment) == ("batch", "before the step") else "device"


def settings_for(strategy, world):
    """20 steps with a check every 5, and one save."""
    checkpoint = {"every_steps": 20, "keep_last": 2}
    return settings(world, strategy, train={"steps": 20}, watch={"every": EVERY}, checkpoint=checkpoint)


def struck(strike, settings, folder):
    """A training in which a bit flips once: whether it did on this rank, and the error."""
    with striking(**strike) as found:
        error = end_of(None, settings, folder, "Plain")
    return {"error": error or "", "struck": found.has_struck}


class Strike:
    """Flips a bit once. The state of the training is known from the first step on."""

    def __init__(self, kind, moment, step, bit):
        self.kind, self.moment, self.bit = kind, moment, bit
        self.left = [step] if isinstance(step, int) else list(step)
        self.at, self.has_struck, self.is_in_pass, self.hooked = 0, False, False, set()
        self.optimizer = self.batch = None

    def come(self, moment, tensor=None):
        """A moment of the step: strike, if it is the one."""
        if moment != self.moment or self.at not in self.left:
            return
        self.left.remove(self.at)
        with torch.no_grad():
            if tensor is None:
                tensor = self.target()
            flip(tensor, self.bit)
        self.has_struck = True

    def target(self):
        if self.kind == "batch":
            found = []
            map_tensors(self.batch, lambda one: found.append(one) or one)
            return found[0]
        groups = self.optimizer.param_groups
        if self.kind == "reduced":
            return _first(self.optimizer).grad.data
        first = next(p for group in groups for p in group["params"] if self.optimizer.state[p] and holds(p))
        return first.data if self.kind == "weight" else self.optimizer.state[first]["exp_avg"].data

    # ---- where the moments are

    def before_step(self, make):
        def wrapped(watch, training):
            self.at, self.optimizer = training.step + 1, training.state.optimizer
            self.batch = training.micro_batches[0].batch
            self.come("before the step")
            make(watch, training)

        return wrapped

    def trial(self, make):
        def wrapped(*arguments, **options):
            self.come("in the check")
            return make(*arguments, **options)

        return wrapped

    def begin(self, make):
        def wrapped(*arguments):
            make(*arguments)
            self.come("before the forward")
            self.is_in_pass = True

        return wrapped

    def factors(self, make):
        def wrapped(*arguments):
            if self.is_in_pass:
                self.come("before the backward")
            return make(*arguments)

        return wrapped

    def end(self, make):
        def wrapped(strategy):
            make(strategy)
            self.is_in_pass = False
            self.come("before the update")

        return wrapped

    def changed(self, make):
        def wrapped(*arguments):
            self.come("at the update")
            return make(*arguments)

        return wrapped

    def update(self, make):
        def wrapped(watch, training):
            make(watch, training)
            self.come("late")

        return wrapped

    def before_module(self, module, _):
        weight = module.weight if self.kind == "gradient" and isinstance(module, nn.Linear) else None
        if weight is not None and id(weight) not in self.hooked and torch.is_grad_enabled():
            self.hooked.add(id(weight))
            weight.register_hook(self.of_gradient)

    def of_gradient(self, gradient):
        if not self.is_in_pass:
            return None
        gradient = gradient.clone()
        self.come("in the pass", gradient)
        return gradient

    def after_module(self, module, _, output):
        if self.kind != "activation" or not self.is_in_pass or not isinstance(module, nn.Linear):
            return None
        other = output.detach().clone()
        self.come("in the pass", other)
        return output + (other - output.detach())


def holds(parameter):
    """Whether this rank has rows of it."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()


@contextlib.contextmanager
def striking(kind, moment, step, *, rank=1, bit=None):
    """Inside, a bit flips on one rank.

    Args:
        step: at which it happens, counted from 1; or several.
        bit: that is flipped. None: the highest of the mantissa.
    """
    strike = Strike(kind, moment, step, bit)
    if os.environ.get("RANK", "0") != str(rank):
        yield strike
        return
    places = [
        (Watch, "before_step", strike.before_step),
        (part, "trial", strike.trial),
        (engine, "_begin", strike.begin),
        (engine, "_factors", strike.factors),
        (Single, "end_shards", strike.end),
        (Precision, "step", strike.changed),
        (Watch, "before_update", strike.update),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name, wrap in places:
            stack.enter_context(mock.patch.object(holder, name, wrap(getattr(holder, name))))
        handles = [
            modules.register_module_forward_pre_hook(strike.before_module),
            modules.register_module_forward_hook(strike.after_module),
        ]
        try:
            yield strike
        finally:
            for handle in handles:
                handle.remove()
