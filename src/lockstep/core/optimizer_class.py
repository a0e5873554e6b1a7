"""Classes of optimizers: found by name, and several optimizers as one."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.core import plugins
from lockstep.core.checkpoint.state import SETTINGS
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import seed_forward
from lockstep.core.errors import UsageError, did_you_mean

_REFUSED = {
    "LBFGS": "it computes the loss several times in an update, by a closure, and a step of Lockstep computes it once",
    "SparseAdam": "it takes sparse gradients only, and gradients are dense here",
}
"""Classes of torch.optim, and why they cannot train."""
# Found by training with every class of torch.optim (tests/core/parallel/test_sharding.py). Muon would silently train
# a different model.
NEED_WHOLE_MATRICES = ("Muon", "Adafactor", "Rprop")
_NO_SHARDED_KERNEL = ("SGD", "Adagrad")
_UPDATE = 2**32  # a word of seeds that no rank is
# Rows of a matrix of 66 columns, and of its two parts. A part has less than 4096 elements: some classes treat it apart.
_ROWS = (130, 33, 97)


class Optimizers(torch.optim.Optimizer):
    """Several optimizers that step as one. Each has its own parameters.

    `param_groups` and `state` are those of all members: the same objects, not copies.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = list(members)
        super().__init__([group for member in members for group in member.param_groups], {})
        for member in self.members:
            self.state.update(member.state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Let each member update its parameters. There is no closure: a step computes its loss once."""
        for member in self.members:
            member.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups = [next(groups) for _ in member.param_groups]
            member.state = self.state


def members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that `optimizer` consists of."""
    return optimizer.members if isinstance(optimizer, Optimizers) else [optimizer]


def classes(optimizer: torch.optim.Optimizer) -> str:
    """The names of the classes that `optimizer` consists of, for people."""
    return " and ".join(dict.fromkeys(type(member).__name__ for member in members(optimizer)))


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """True if all classes are of `torch.optim`."""
    known = _of_torch().values()
    return all(type(member) in known for member in members(optimizer))


# ---- by name


def find(name: str, where: str = "optim.name") -> type[torch.optim.Optimizer]:
    """The class of a name: `AdamW`, `torch.optim.AdamW`, `package.module:Class` or `FILE.py:Class`.

    Args:
        where: the key of the config, for errors.

    Raises:
        UsageError: there is no such class, or it cannot train here; names the classes that there are.
    """
    known, short = _of_torch(), name.removeprefix("torch.optim.").removeprefix("torch.optim:")
    if short in known:
        return known[short]
    if short in _REFUSED:
        remedy = f"use another optimizer: {', '.join(sorted(known))}"
        raise UsageError(f"{short} cannot train here: {_REFUSED[short]}", where=where, remedy=remedy)
    module, _, class_name = (name if ":" in name else ":".join(name.rsplit(".", 1))).rpartition(":")
    if module in ("", "torch.optim"):
        remedy = f"{did_you_mean(short, known)}There are: {', '.join(sorted(known))}; and package.module:Class"
        raise UsageError(f"torch.optim has no {short!r}", where=where, remedy=remedy)
    found = plugins.named(f"{module}:{class_name}", key=where)
    if not plugins.is_subclass(found, torch.optim.Optimizer):
        what = f"{module} has no class {class_name!r} that is a torch.optim.Optimizer"
        raise UsageError(what, where=f"{where}={name}", remedy="write it as FILE.py:Class or package.module:Class")
    return found


def _of_torch() -> dict[str, type[torch.optim.Optimizer]]:
    found = {n: k for n, k in vars(torch.optim).items() if plugins.is_subclass(k, torch.optim.Optimizer)}
    return {name: kind for name, kind in found.items() if name not in _REFUSED}


def with_fused_kernel() -> list[str]:
    """The classes of torch.optim that have a fused kernel."""
    return sorted(name for name, kind in _of_torch().items() if "fused" in inspect.signature(kind).parameters)


def check_arguments(kind: type, args: Mapping[str, Any], *, decays: bool, where: str = "optim") -> None:
    """Check that a class takes these arguments.

    Args:
        decays: whether a weight decay is given.

    Raises:
        UsageError: it does not take them; names the arguments that it takes.
    """
    parameters, class_name = inspect.signature(kind).parameters, kind.__name__
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    allowed = [name for name in parameters if name not in ("params", "lr", "weight_decay")]
    for name in args:
        if name in ("lr", "weight_decay"):
            raise UsageError(f"{name} has its own key", where=f"{where}.args.{name}", remedy=f"set {where}.{name}")
        if name not in allowed and not takes_all:
            remedy = f"{did_you_mean(name, allowed)}It takes: {', '.join(allowed)}"
            raise UsageError(f"{class_name} takes no argument {name!r}", where=f"{where}.args.{name}", remedy=remedy)
    if decays and "weight_decay" not in parameters and not takes_all:
        raise UsageError(
            f"{class_name} takes no argument 'weight_decay'",
            where=f"{where}.weight_decay",
            remedy="leave it out, also in optim.groups",
        )


# ---- what a training asks of an optimizer


@functools.cache
def _digest_of(kind: Any) -> str:
    """SHA-256 of the source of a class. It is read once: the user may edit the file while the training runs."""
    return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()


def takes_fused_kernel(parameter: torch.Tensor) -> bool:
    """True if torch's fused kernels update a parameter as its other kernels do: on a CPU, without gaps in memory."""
    return parameter.device.type != "cpu" or torch.empty_like(parameter).stride() == parameter.stride()


def watch_strides(optimizer: torch.optim.Optimizer) -> None:
    """See that gradients have the strides of their parameters in each update by a fused kernel on a CPU.

    Raises:
        UsageError: the kernel would update a parameter wrongly.
    """
    parameters = fused_on_cpu(optimizer)
    for parameter in parameters:
        if not takes_fused_kernel(parameter):
            what = f"fused kernels cannot update a parameter with gaps in memory: its strides are {parameter.stride()}"
            raise UsageError(what, where="optim.fused", remedy="leave it out, or make the parameter contiguous")
    if parameters:
        optimizer.register_step_pre_hook(functools.partial(match_strides, parameters))


def match_strides(parameters: Sequence[nn.Parameter], *_: object) -> None:
    """Give gradients the strides of their parameters: a fused kernel on a CPU takes elements as they are in memory."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def fused_on_cpu(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates by a fused kernel on a CPU."""
    groups = [group for member in members(optimizer) for group in member.param_groups if group.get("fused")]
    return [parameter for group in groups for parameter in group["params"] if parameter.device.type == "cpu"]


def code_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of the source of each class of an optimizer from a file that the config names."""
    kinds: list[Any] = [type(member) for member in members(optimizer)]
    return {kind.__name__: _digest_of(kind) for kind in kinds if kind.__module__.startswith(plugins.NAMED_PREFIX)}


def note_settings(optimizer: torch.optim.Optimizer) -> None:
    """Note the settings of each group: checkpoints hold what the optimizer itself changes of them.

    Also note the source of its classes, for `code_of`.
    """
    code_of(optimizer)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    setattr(optimizer, SETTINGS, copy.deepcopy(settings))


def seed_updates(optimizer: torch.optim.Optimizer, seed: int, step: Callable[[], int], device: torch.device) -> None:
    """Let an update that draws random numbers draw the same on all ranks, and again in a resumed training.

    The optimizers of torch draw none; for these nothing is done.

    Args:
        seed: of the run.
        step: gives the number of steps so far.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        what = f"{type(optimizer).__name__} was made without torch.optim.Optimizer.__init__"
        raise UsageError(what, where="optim.name", remedy="call super().__init__(groups, defaults) in its constructor")
    if not is_of_torch(optimizer):
        optimizer.register_step_pre_hook(lambda *_: seed_forward(derive_seed(seed, step(), _UPDATE), device))


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments with which another optimizer of this class is made."""
    taken = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in taken}


def like(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], given: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """An optimizer of the same class. None if a class that is not torch's takes other arguments than its options."""
    make: Any = type(optimizer)
    try:
        made: torch.optim.Optimizer = make(parameters, **given)
    except (TypeError, ValueError):
        if type(optimizer) in _of_torch().values():
            raise
        return None
    return made


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can train shards of parameters.

    The classes of torch.optim are known. Another class gets a matrix, and then its two parts, with the same gradients:
    the updates must be equal.

    Raises:
        UsageError: it needs whole matrices, or torch has no kernel for shards.
    """
    kind = type(optimizer)
    remedy = "use AdamW, SGD or another optimizer that updates each element by itself, or parallel.strategy=ddp"
    if kind in _of_torch().values():
        if kind.__name__ in NEED_WHOLE_MATRICES:
            raise UsageError(f"{kind.__name__} cannot train sharded parameters", where="optim.name", remedy=remedy)
        if kind.__name__ in _NO_SHARDED_KERNEL and any(group.get("fused") for group in optimizer.param_groups):
            text = f"torch's fused kernel of {kind.__name__} takes no sharded parameters"
            raise UsageError(text, where="optim.fused", remedy="leave fused out, or use parallel.strategy=ddp")
        return
    whole, parts = (_updated(optimizer, cuts) for cuts in (_ROWS[:1], _ROWS[1:]))
    if whole is None:
        what = f"{kind.__name__} may need whole matrices: its options do not say how to make a second one for a test"
        raise UsageError(what, where="optim.name", remedy=remedy)
    if parts is None or not torch.equal(whole, parts):
        what = (
            f"{kind.__name__} cannot train sharded parameters: it updates two parts of a matrix differently than "
            "the whole"
        )
        raise UsageError(what, where="optim.name", remedy=remedy)


def _updated(optimizer: torch.optim.Optimizer, cuts: Sequence[int]) -> torch.Tensor | None:
    """A matrix after three updates, in pieces of `cuts` rows."""
    device = optimizer.param_groups[0]["params"][0].device
    values, *gradients = torch.randn(4, _ROWS[0], 66, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [nn.Parameter(piece.clone()) for piece in values.split(list(cuts))]
    made = like(optimizer, pieces, options(optimizer))
    if made is None:
        return None
    for gradient in gradients:
        for piece, own in zip(pieces, gradient.split(list(cuts)), strict=True):
            piece.grad = own.clone()
        made.step()
    return torch.cat([piece.detach() for piece in pieces])


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer | None]
"""`Task.optimizer`: from groups of parameters to an optimizer."""


def given(make: Make, groups: list[dict[str, Any]], *, scale: float) -> torch.optim.Optimizer | None:
    """The optimizer that a task makes of `groups`. None: it leaves the choice to the config.

    Each of its groups gets a `name` and a `base_lr`, which schedules multiply.

    Args:
        scale: factor on learning rates that the task chooses. Those in `groups` have it already.

    Raises:
        UsageError: it returned something else, or a group has no learning rate.
    """
    made = make([dict(group) for group in groups])
    if made is None:
        return None
    if not isinstance(made, torch.optim.Optimizer):
        what = f"it returned a {type(made).__name__}, and not a torch.optim.Optimizer"
        raise UsageError(what, where="Task.optimizer", remedy="return one optimizer over all groups")
    if any("lr" in group for group in groups) and not any("base_lr" in group for group in made.param_groups):
        what = "the config sets learning rates, and the optimizer does not have them"
        remedy = "give the optimizer the groups that Task.optimizer gets, with all their keys; or leave out optim.lr"
        raise UsageError(what, where="Task.optimizer", remedy=remedy)
    complete(made, scale=scale, where="Task.optimizer")
    return made


def complete(made: torch.optim.Optimizer, *, scale: float, where: str) -> None:
    """Give each group of an optimizer a unique `name` and a `base_lr`, if its class has formed different groups.

    Args:
        scale: factor on the learning rates of groups without a `base_lr`.
        where: for errors.

    Raises:
        UsageError: a group has no learning rate.
    """
    names: set[str] = set()
    for number, group in enumerate(made.param_groups):
        if "lr" not in group:
            what = f"group {number} of {type(made).__name__} has no 'lr', which the schedule multiplies"
            raise UsageError(what, where=where, remedy="give each group a learning rate")
        name = group.get("name", f"group-{number}")
        group["name"] = f"{name}-{number}" if name in names else name  # parts of a group: checkpoints tell them apart
        names.add(group["name"])
        group["base_lr"] = float(group["lr"]) * (1.0 if "base_lr" in group else scale)
