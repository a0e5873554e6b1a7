"""The optimizer, and parameter groups by name pattern. It imports torch late: the config imports it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section
from lockstep.core.errors import UsageError
from lockstep.core.parameter_names import matches, names_of_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.core.optimizer_class import Make

_FUSED = ("Adam", "AdamW")  # fused without being asked; for the other optimizers, torch calls its kernels new


class ParameterGroup(Section):
    """A group of parameters with its own learning rate and weight decay."""

    name: str
    """Name of the group in the log."""
    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of parameter names, with `*` and `?`. A parameter belongs to the first group that matches it; a tied
    parameter by any of its names."""
    ndim: PositiveInt | None = None
    """Only parameters with this number of dimensions: 2 for matrices. None: any."""
    lr: PositiveFloat | None = None
    """None: `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: `optim.weight_decay`."""
    optimizer: str | None = None
    """The class that trains this group, as in `optim.name`. None: the class of `optim.name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `optimizer`."""

    @model_validator(mode="after")
    def _args_have_an_optimizer(self) -> ParameterGroup:
        if self.args and self.optimizer is None:
            raise ValueError("args are for a group with its own `optimizer`; without it, `optim.args` count")
        return self

    def takes(self, names: Sequence[str], parameter: Any) -> bool:
        """True if a parameter, with all its names, belongs to this group, unless an earlier group takes it."""
        return self.ndim in (None, parameter.ndim) and matches(names, self.match)


class OptimConfig(Section):
    """The optimizer."""

    name: str = "AdamW"
    """A class of torch.optim, `package.module:Class` or `FILE.py:Class`."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, before `lr_scaling`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: the default of the optimizer."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient. None: no clipping."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with batch.global / reference_batch."""
    reference_batch: PositiveInt = 32
    """Global batch that `lr` is meant for, in samples."""
    fused: Annotated[bool | None, DOES_NOT_DETERMINE] = None
    """True if a single kernel does the whole update. None: Adam and AdamW use it, on a CPU for whole parameters."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of each of the model's repeated blocks, relative to the block above it."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with their own learning rate or weight decay, by patterns of names. The first match counts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer (momentum, betas, ...)."""

    @model_validator(mode="after")
    def _names_differ(self) -> OptimConfig:
        names = [group.name for group in self.groups]
        if len({*names, "default"}) <= len(names):
            raise ValueError("group names must differ from each other and from 'default'")
        return self


def build_optimizer(
    model: nn.Module,
    optim: OptimConfig,
    *,
    scale: float = 1.0,
    fuses_adam: bool = False,
    blocks: Sequence[str] = (),
    make: Make | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over all parameters of `model`.

    The first group that matches a parameter takes it. The other parameters form the group `default`. Frozen parameters
    are in their group from the start, so that no group changes when they begin to train: an optimizer skips parameters
    without a gradient. Each group keeps its `name` and its `base_lr`, which schedules multiply. If groups have their
    own optimizers, these train them, and the result is an `Optimizers`.

    `optim.layer_decay` divides groups without their own learning rate by depth. Parameters n levels below the top
    learn at lr * layer_decay**n (Howard and Ruder 2018, arXiv:1801.06146, section 3.1; as in Clark et al. 2020,
    arXiv:2003.10555). The levels are: all that comes before the first block, each block, and all that comes after the
    last block.

    Args:
        scale: factor on all learning rates.
        fuses_adam: Adam and AdamW use their fused kernel, if it can update all parameters and the config leaves the
            choice.
        blocks: names of the model's repeated blocks, in the model's order; for `optim.layer_decay`.
        make: `Task.optimizer`. It may make the optimizer of the groups, instead of the config.

    Raises:
        UsageError: an unknown optimizer or argument, or a group that matches no parameter; names the known values.
    """
    from lockstep.core import optimizer_class

    groups = _param_groups(model, optim, scale=scale, blocks=blocks)
    own = None
    if make is not None:
        chosen = optim.lr != OptimConfig().lr or optim.layer_decay is not None
        own = optimizer_class.given(
            make,
            [
                {key: value for key, value in one.items() if chosen or group.lr or key not in ("lr", "base_lr")}
                for group, of_group in groups
                for one in of_group
            ],
            scale=scale,
        )
    if own is not None:
        others = ["optim.name"] * (optim.name != OptimConfig().name) + ["optim.args"] * bool(optim.args)
        others += [f"optim.groups, group {group.name!r}: optimizer" for group in optim.groups if group.optimizer]
        if others:
            what = f"Task.optimizer makes the optimizer, and the config has {others[0]}, too"
            raise UsageError(what, where=others[0], remedy="leave the key out, or Task.optimizer")
        return own
    made, rest = [], [one for group, of_group in groups if group.optimizer is None for one in of_group]
    if rest:
        made.append(_default_optimizer(model, optim, rest, scale=scale, fuses_adam=fuses_adam))
    for group, of_group in groups:
        if group.optimizer is not None:
            where = f"optim.groups, group {group.name!r}"
            kind = optimizer_class.find(group.optimizer, f"{where}: optimizer")
            decays = any("weight_decay" in one for one in of_group)
            made.append(_made(kind, of_group, of_group[0]["base_lr"], group.args, decays=decays, where=where))
    return made[0] if len(made) == 1 else optimizer_class.Optimizers(made)


def _param_groups(
    model: nn.Module, optim: OptimConfig, *, scale: float, blocks: Sequence[str]
) -> list[tuple[ParameterGroup, list[dict[str, Any]]]]:
    """For each group of the config, and for `default`, its groups for an optimizer: one, or one for each level."""
    depths = _depths(model, blocks) if optim.layer_decay is not None else {}
    found = []
    for group, members in _members(model, optim.groups):
        decay = group.weight_decay if group.weight_decay is not None else optim.weight_decay
        options = {} if decay is None else {"weight_decay": decay}
        levels: dict[int | None, list[nn.Parameter]] = {}
        for parameter_name, parameter in members:
            levels.setdefault(depths.get(parameter_name) if group.lr is None else None, []).append(parameter)
        of_group: list[dict[str, Any]] = []
        for level, parameters in levels.items():
            rate, group_name = (group.lr if group.lr is not None else optim.lr) * scale, group.name
            if level is not None and optim.layer_decay is not None:
                rate *= optim.layer_decay ** (max(depths.values()) - level)
                group_name = f"{group.name}/level-{level}"
            of_group.append({"params": parameters, "name": group_name, "lr": rate, "base_lr": rate, **options})
        found.append((group, of_group))
    return found


def _default_optimizer(
    model: nn.Module, optim: OptimConfig, groups: list[dict[str, Any]], *, scale: float, fuses_adam: bool
) -> torch.optim.Optimizer:
    """The optimizer of `optim.name` over `groups`."""
    from lockstep.core import optimizer_class

    kind, args, fused = optimizer_class.find(optim.name), optim.args, optim.fused
    if fused and "fused" not in inspect.signature(kind).parameters:
        remedy = f"leave it out, or use one of {', '.join(optimizer_class.with_fused_kernel())}"
        raise UsageError(f"{optim.name} has no fused kernel", where="optim.fused", remedy=remedy)
    if fused is not None and args.get("fused", fused) != fused:
        both = f"optim.fused={str(fused).lower()} and optim.args.fused={str(args['fused']).lower()} disagree"
        raise UsageError(both, where="optim.args.fused", remedy="leave it out: optim.fused decides")
    if fused is None:
        fused = fuses_adam and _can_fuse(kind, model, args)
    decays = any("weight_decay" in group for group in groups)
    return _made(kind, groups, optim.lr * scale, {**({"fused": True} if fused else {}), **args}, decays=decays)


def _made(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    lr: float,
    args: Mapping[str, Any],
    *,
    decays: bool,
    where: str = "optim",
) -> torch.optim.Optimizer:
    from lockstep.core import optimizer_class

    optimizer_class.check_arguments(kind, args, decays=decays, where=where)
    make: Any = kind
    try:
        made: torch.optim.Optimizer = make(groups, **{"lr": lr, **args})
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        remedy = "see the documentation of this class"
        raise UsageError(str(error), where=f"{where}.args of {kind.__name__}", remedy=remedy) from error
    optimizer_class.complete(made, scale=1.0, where=where)
    return made


def _can_fuse(kind: type, model: nn.Module, args: Mapping[str, Any]) -> bool:
    """True if the fused kernel of Adam or AdamW can update all parameters, and `args` choose no other kernel.

    On a CPU it computes 16-bit parameters in another precision than torch's default kernel, so it is not chosen.
    """
    from lockstep.core import optimizer_class

    chosen = {"foreach", "fused", "differentiable"} & args.keys()
    return (
        kind.__module__.startswith("torch.")
        and kind.__name__ in _FUSED
        and not chosen
        and all(p.is_floating_point() and optimizer_class.takes_fused_kernel(p) for p in model.parameters())
        and not any(
            p.device.type == "cpu" and (p.element_size() < 4 or args.get("capturable")) for p in model.parameters()
        )
    )


def _members(
    model: nn.Module, groups: Sequence[ParameterGroup]
) -> list[tuple[ParameterGroup, list[tuple[str, nn.Parameter]]]]:
    """The groups, and `default` as the last, with the names and parameters that belong to each.

    Raises:
        UsageError: a group matches no parameter.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in [*(g.name for g in groups), "default"]}
    names_of = names_of_parameters(model)
    for name, parameter in model.named_parameters():
        owner = next((group.name for group in groups if group.takes(names_of[name], parameter)), "default")
        members[owner].append((name, parameter))
    by_name = {group.name: group for group in groups}
    for group in by_name.values():
        if not members[group.name]:
            names = ", ".join(name for name, _ in list(model.named_parameters())[:8])
            raise UsageError(
                f"no parameter matches {list(group.match)}" + f" with {group.ndim} dimensions" * bool(group.ndim),
                where=f"optim.groups, group {group.name!r}",
                remedy=f"use patterns over the model's parameter names, such as: {names}",
            )
    rest = ParameterGroup(name="default", match=["*"])
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
