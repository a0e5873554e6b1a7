"""Optimizer and parameter groups by name pattern."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Group:
    """Parameters whose name matches one of `match` (shell patterns, `*` and `?`); None keeps the common value."""

    name: str
    match: Sequence[str]
    lr: float | None = None
    weight_decay: float | None = None


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float | None = None,
    groups: Sequence[Group] = (),
    args: Mapping[str, Any] | None = None,
    fused: bool = False,
    layer_decay: float | None = None,
    blocks: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Any class of `torch.optim` over all parameters of `model`; `fused` where the class has such a kernel.

    The first group that matches a parameter takes it; the rest form the group `default`. Frozen parameters are in
    their group from the start (an optimizer passes over those without gradient), so that thawing them later changes
    no group. Each group keeps `name` and `base_lr`, which schedules multiply.

    Args:
        layer_decay: groups without a learning rate of their own are divided by depth, and what lies n levels below the top
            learns at the common rate times layer_decay**n (Howard and Ruder 2018, arXiv:1801.06146, section 3.1; as in Clark
            et al. 2020, arXiv:2003.10555). Levels: what comes before the first block, each block, what comes after the last.
        blocks: names of the model's repeated blocks, in its order.

    Raises:
        UsageError: unknown optimizer or argument, or a group that matches nothing; names what there is.
    """
    kind = _optimizer_class(name)
    depths = _depths(model, blocks) if layer_decay is not None else {}
    settings = {group.name: group for group in groups}
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in [*settings, "default"]}
    for parameter_name, parameter in model.named_parameters():
        owner = next((g.name for g in groups if any(fnmatchcase(parameter_name, p) for p in g.match)), "default")
        members[owner].append((parameter_name, parameter))
    param_groups: list[dict[str, Any]] = []
    for group_name, named in members.items():
        own = settings.get(group_name, Group(group_name, ()))
        if not named and group_name in settings:
            names = ", ".join(n for n, _ in list(model.named_parameters())[:8])
            remedy = f"use patterns over the model's parameter names, such as: {names}"
            raise UsageError(
                f"no parameter matches {list(own.match)}", where=f"optim.groups, group {group_name!r}", remedy=remedy
            )
        decay = (
            {}
            if own.weight_decay is None and weight_decay is None
            else {"weight_decay": own.weight_decay if own.weight_decay is not None else weight_decay}
        )
        levels: dict[int | None, list[nn.Parameter]] = {}
        for parameter_name, parameter in named:
            levels.setdefault(depths.get(parameter_name) if own.lr is None else None, []).append(parameter)
        for level, parameters in levels.items():
            rate, part = own.lr if own.lr is not None else lr, group_name
            if level is not None and layer_decay is not None:
                rate, part = rate * layer_decay ** (max(depths.values()) - level), f"{group_name}/level-{level}"
            param_groups.append({"params": parameters, "name": part, "lr": rate, "base_lr": rate, **decay})
    _check_arguments(kind, args or {}, decays=any("weight_decay" in options for options in param_groups))
    if fused and "fused" not in inspect.signature(kind).parameters:
        able = ", ".join(sorted(n for n, k in _optimizers().items() if "fused" in inspect.signature(k).parameters))
        raise UsageError(
            f"{name} has no fused kernel", where="optim.fused", remedy=f"leave it out, or use one of {able}"
        )
    try:
        return kind(param_groups, **{"lr": lr, **({"fused": True} if fused else {}), **(args or {})})
    except Exception as error:
        raise UsageError(
            str(error), where=f"optim.args of {name}", remedy="see the documentation of this torch.optim class"
        ) from error


def _depths(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Level of each parameter, by name: 0 before the first block, then block by block, and one more after the last.

    Raises:
        UsageError: no repeated blocks, so no levels.
    """
    if not blocks:
        remedy = "set parallel.shard_modules to patterns of its blocks, or optim.layer_decay=null"
        raise UsageError(
            "the model has no repeated blocks, whose depth it could count", where="optim.layer_decay", remedy=remedy
        )
    depths: dict[str, int] = {}
    begun = False
    for name, _ in model.named_parameters():
        place = next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        begun = begun or place is not None
        depths[name] = place + 1 if place is not None else len(blocks) + 1 if begun else 0
    return depths


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    known = _optimizers()
    if name in known:
        return known[name]
    remedy = f"{did_you_mean(name, known)}There are: {', '.join(sorted(known))}"
    raise UsageError(f"torch.optim has no {name!r}", where="optim.name", remedy=remedy)


def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    known = {n: k for n, k in vars(torch.optim).items() if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)}
    for name in ("Optimizer", "LBFGS", "SparseAdam"):  # the base; needs a closure; needs sparse gradients
        known.pop(name, None)
    return known


def _check_arguments(kind: type, given: Mapping[str, Any], decays: bool) -> None:
    allowed = [name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")]
    for name in given:
        if name in ("lr", "weight_decay"):
            raise UsageError("given in a second place", where=f"optim.args.{name}", remedy=f"set optim.{name}")
        if name not in allowed:
            remedy = f"{did_you_mean(name, allowed)}It takes: {', '.join(allowed)}"
            raise UsageError(f"{kind.__name__} takes no argument {name!r}", where=f"optim.args.{name}", remedy=remedy)
    if decays and "weight_decay" not in inspect.signature(kind).parameters:
        raise UsageError(
            f"{kind.__name__} takes no argument 'weight_decay'",
            where="optim.weight_decay",
            remedy="leave it out, also in optim.groups",
        )
