"""The optimizer, and parameter groups by name pattern. It imports torch late: the config imports it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section
from lockstep.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

_FUSED = ("Adam", "AdamW")  # fused without being asked; for the other optimizers, torch calls its kernels new
_REFUSED = {
    "LBFGS": "it computes the loss several times in an update, by a closure, and a step of Lockstep computes it once",
    "SparseAdam": "it takes sparse gradients only, and gradients are dense here",
}
"""Classes of torch.optim, and why they cannot train."""
_WAYS = (
    "differentiable",
    "capturable",
    "fused",
    "foreach",
)  # how an update is made; torch refuses some when it is made


class Group(Section):
    """A group of parameters with a learning rate and a weight decay of its own."""

    name: str
    """Name of the group in the log."""
    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of parameter names, with `*` and `?`. A parameter belongs to the first group that matches it."""
    lr: PositiveFloat | None = None
    """None: `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: `optim.weight_decay`."""


class OptimConfig(Section):
    """The optimizer."""

    name: str = "AdamW"
    """A class of torch.optim."""
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: the default of the optimizer."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient. None: no clipping."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with batch.global / reference_batch."""
    reference_batch: PositiveInt = 32
    """Global batch for which `lr` is meant, in samples."""
    fused: Annotated[bool | None, DOES_NOT_DETERMINE] = None
    """True if a single kernel does the whole update. None: Adam and AdamW use it on CUDA."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of each of the model's repeated blocks, relative to the block above it."""
    groups: list[Group] = Field(default_factory=list)
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer (momentum, betas, ...)."""

    @model_validator(mode="after")
    def _names_differ(self) -> OptimConfig:
        names = [group.name for group in self.groups]
        if len({*names, "default"}) <= len(names):
            raise ValueError("group names must differ from each other and from 'default'")
        return self


def build_optimizer(
    model: nn.Module, optim: OptimConfig, *, scale: float = 1.0, fuses_adam: bool = False, blocks: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """An optimizer of `torch.optim` over all parameters of `model`.

    The first group that matches a parameter takes it. The other parameters form the group `default`. Frozen parameters
    are in their group from the start, so that no group changes when they begin to train: an optimizer skips parameters
    without a gradient. Each group keeps its `name` and its `base_lr`, which schedules multiply.

    `optim.layer_decay` divides groups without a learning rate of their own by depth. Parameters n levels below the top
    learn at lr * layer_decay**n (Howard and Ruder 2018, arXiv:1801.06146, section 3.1; as in Clark et al. 2020,
    arXiv:2003.10555). The levels are: all that comes before the first block, each block, and all that comes after the
    last block.

    Args:
        scale: factor on all learning rates.
        fuses_adam: Adam and AdamW use their fused kernel, where it can update all parameters and the config leaves the
            choice.
        blocks: names of the model's repeated blocks, in the model's order; for `optim.layer_decay`.

    Raises:
        UsageError: an unknown optimizer or argument, or a group that matches no parameter; names the known values.
    """
    optimizer_class, args, fused = _optimizer_class(optim.name), optim.args, optim.fused
    depths = _depths(model, blocks) if optim.layer_decay is not None else {}
    param_groups: list[dict[str, Any]] = []
    for group, members in _members(model, optim.groups):
        decay = group.weight_decay if group.weight_decay is not None else optim.weight_decay
        options = {} if decay is None else {"weight_decay": decay}
        levels: dict[int | None, list[nn.Parameter]] = {}
        for parameter_name, parameter in members:
            levels.setdefault(depths.get(parameter_name) if group.lr is None else None, []).append(parameter)
        for level, parameters in levels.items():
            rate, group_name = (group.lr if group.lr is not None else optim.lr) * scale, group.name
            if level is not None and optim.layer_decay is not None:
                rate *= optim.layer_decay ** (max(depths.values()) - level)
                group_name = f"{group.name}/level-{level}"
            param_groups.append({"params": parameters, "name": group_name, "lr": rate, "base_lr": rate, **options})
    _check_arguments(optimizer_class, args, decays=any("weight_decay" in options for options in param_groups))
    if fused and "fused" not in inspect.signature(optimizer_class).parameters:
        with_kernel = (n for n, c in _optimizer_classes().items() if "fused" in inspect.signature(c).parameters)
        remedy = f"leave it out, or use one of {', '.join(sorted(with_kernel))}"
        raise UsageError(f"{optim.name} has no fused kernel", where="optim.fused", remedy=remedy)
    if fused is not None and args.get("fused", fused) != fused:
        both = f"optim.fused={str(fused).lower()} and optim.args.fused={str(args['fused']).lower()} disagree"
        raise UsageError(both, where="optim.args.fused", remedy="leave it out: optim.fused decides")
    if fused is None:
        fused = fuses_adam and _can_fuse(optim.name, model, args)
    try:
        return optimizer_class(param_groups, **{"lr": optim.lr * scale, **({"fused": True} if fused else {}), **args})
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        remedy = "see the documentation of this torch.optim class"
        raise UsageError(str(error), where=f"optim.args of {optim.name}", remedy=remedy) from error


def check_updates(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of the same class and options update a small parameter of each kind that `optimizer` has.

    torch checks some options only in an update: which device can do it, which dtype.

    Raises:
        UsageError: it cannot; names the option.
    """
    import torch

    kinds = {(p.device, p.dtype) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    for device, dtype in sorted(kinds, key=str):

        def fault(given: Mapping[str, Any], device: torch.device = device, dtype: torch.dtype = dtype) -> str | None:
            parameter = torch.nn.Parameter(torch.zeros(4, 4, device=device, dtype=dtype))
            parameter.grad = torch.zeros_like(parameter)
            try:
                type(optimizer)([parameter], **given).step(lambda: 0.0)
            except (TypeError, ValueError, AssertionError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            return None

        if (what := fault(options)) is None:
            continue
        chosen = [name for name in _WAYS if options.get(name)]
        cause = next(
            (name for name in chosen if fault(options | {name: None if name == "foreach" else False}) is None), None
        )
        where = "optim" if cause is None else "optim.fused=true" if cause == "fused" else f"optim.args.{cause}=true"
        remedy = "leave it out" if cause else "use other values in optim.args, or another optimizer"
        raise UsageError(
            f"{type(optimizer).__name__} cannot update parameters of {str(dtype).removeprefix('torch.')} on "
            f"{device.type} so: {what}",
            where=where,
            remedy=remedy,
        )


def _can_fuse(name: str, model: nn.Module, args: Mapping[str, Any]) -> bool:
    """True if the fused kernel of Adam or AdamW can update all parameters, and `args` choose no other kernel."""
    chosen = {"foreach", "fused", "differentiable"} & args.keys()
    return name in _FUSED and not chosen and all(p.is_floating_point() for p in model.parameters())


def _members(model: nn.Module, groups: Sequence[Group]) -> list[tuple[Group, list[tuple[str, nn.Parameter]]]]:
    """The groups, and `default` as the last, with the names and parameters that belong to each.

    Raises:
        UsageError: a group matches no parameter.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in [*(g.name for g in groups), "default"]}
    for name, parameter in model.named_parameters():
        owner = next((g.name for g in groups if any(fnmatchcase(name, pattern) for pattern in g.match)), "default")
        members[owner].append((name, parameter))
    by_name = {group.name: group for group in groups}
    for group in by_name.values():
        if not members[group.name]:
            names = ", ".join(name for name, _ in list(model.named_parameters())[:8])
            raise UsageError(
                f"no parameter matches {list(group.match)}",
                where=f"optim.groups, group {group.name!r}",
                remedy=f"use patterns over the model's parameter names, such as: {names}",
            )
    rest = Group(name="default", match=["*"])
    return [(by_name.get(name, rest), named) for name, named in members.items()]


def _depths(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Level of each parameter by name: 0 before the first block, then 1, 2, ... by block, then one more.

    Raises:
        UsageError: the model has no repeated blocks.
    """
    if not blocks:
        remedy = "set parallel.shard_modules to patterns of its blocks, or optim.layer_decay=null"
        what = "the model has no repeated blocks, by which a depth could be counted"
        raise UsageError(what, where="optim.layer_decay", remedy=remedy)
    depths: dict[str, int] = {}
    begun = False
    for name, _ in model.named_parameters():
        index = next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        begun = begun or index is not None
        depths[name] = index + 1 if index is not None else len(blocks) + 1 if begun else 0
    return depths


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    known = _optimizer_classes()
    if name in known:
        return known[name]
    if name in _REFUSED:
        remedy = f"use another optimizer: {', '.join(sorted(known))}"
        raise UsageError(f"{name} cannot train here: {_REFUSED[name]}", where="optim.name", remedy=remedy)
    remedy = f"{did_you_mean(name, known)}There are: {', '.join(sorted(known))}"
    raise UsageError(f"torch.optim has no {name!r}", where="optim.name", remedy=remedy)


def _optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    import torch

    known = {n: k for n, k in vars(torch.optim).items() if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)}
    for name in ("Optimizer", *_REFUSED):
        known.pop(name, None)
    return known


def _check_arguments(optimizer_class: type, args: Mapping[str, Any], *, decays: bool) -> None:
    """Raises UsageError where the class does not take an argument.

    Args:
        decays: whether a weight decay is given.
    """
    parameters, class_name = inspect.signature(optimizer_class).parameters, optimizer_class.__name__
    allowed = [name for name in parameters if name not in ("params", "lr", "weight_decay")]
    for name in args:
        if name in ("lr", "weight_decay"):
            raise UsageError(f"{name} has a key of its own", where=f"optim.args.{name}", remedy=f"set optim.{name}")
        if name not in allowed:
            remedy = f"{did_you_mean(name, allowed)}It takes: {', '.join(allowed)}"
            raise UsageError(f"{class_name} takes no argument {name!r}", where=f"optim.args.{name}", remedy=remedy)
    if decays and "weight_decay" not in parameters:
        raise UsageError(
            f"{class_name} takes no argument 'weight_decay'",
            where="optim.weight_decay",
            remedy="leave it out, also in optim.groups",
        )
