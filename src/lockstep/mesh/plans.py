"""Which layers of a model are sharded over the ranks of a tensor group, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lockstep.core.errors import UsageError, did_you_mean, listed

_SHOWN = 5
CUT = {
    "colwise": (nn.Linear, "out_features"),
    "colwise_gather_output": (nn.Linear, "out_features"),
    "rowwise": (nn.Linear, "in_features"),
    "rowwise_split_input": (nn.Linear, "in_features"),
    "embedding_rowwise": (nn.Embedding, "num_embeddings"),
}
"""The styles that shard a layer: the class of such layers, and the number that must divide."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a layer that every rank holds whole and applies to its heads: its gradients are summed."""
SEQUENCE = "sequence_parallel"
"""The style of a block in which each rank has a part of the tokens between sharded layers."""
SEES = "sequence_gather"
"""The style of a module in such a block that gets all tokens, because it depends on the shape of its input."""
WORDS = "colwise_gather_output"
"""The style of a last layer: it is sharded over its outputs, and returns all of them."""
WORDS_IN = "embedding_rowwise"
_AT_THE_ENDS = (WORDS_IN, WORDS)  # stay whole if a model's plan cannot shard them
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head", "heads")


class ShardingPlan(NamedTuple):
    """The plan of a model."""

    styles: dict[str, str]
    """By name of a module: its style."""
    notes: list[str]
    """Lines for the log."""
    tied: list[tuple[str, str]]
    """Pairs of a last layer and an embedding whose shared weight is sharded."""
    inside: dict[str, str]
    """By name of a module in a block with `sequence_parallel` that works on parts: the block."""


def plan_of(model: nn.Module, own: Mapping[str, str] | None, ranks: int) -> ShardingPlan:
    """How `model` is sharded over `ranks` ranks.

    Args:
        own: what `Task.tensor_plan` returned. None: use the plans of transformers models in `model`.

    Raises:
        UsageError: there is no plan, a pattern or a style is unknown, or heads or rows do not divide; names them.
    """
    where = f"parallel.tensor={ranks}" if own is None else "Task.tensor_plan"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        what = "SyncBatchNorm would count the samples of a tensor group several times"
        raise UsageError(what, where=f"parallel.tensor={ranks}", remedy="use GroupNorm or LayerNorm")
    wanted = dict(_of_transformers(model)) if own is None else dict(own)
    names = _matched(model, wanted, where, is_own=own is not None)
    if not names:
        raise UsageError(
            f"there is no plan for sharding {type(model).__name__} over {ranks} ranks",
            where=where,
            remedy="return a style by pattern over module names from Task.tensor_plan, such as "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}; or use parallel.strategy=fsdp with "
            "parallel.tensor=1, which needs no plan",
        )
    notes: list[str] = []
    tied: list[tuple[str, str]] = []
    whole: set[str] = set()
    for sharing in _sharing(model):
        ends = {names.get(name): name for name in sharing}
        if len(sharing) == 2 and ends.keys() == {*_AT_THE_ENDS}:  # both are sharded over the same words
            tied.append((ends[WORDS], ends[WORDS_IN]))
        else:
            whole |= sharing
    for name in sorted(whole & names.keys()):
        if own is not None:
            what, remedy = f"{name} shares its weight with another module", "remove both from the plan"
            raise UsageError(what, where=where, remedy=remedy)
        notes.append(f"  {name} stays whole: it shares its weight with another module")
        del names[name]
    _check_types(model, names, where)
    uneven = _uneven(model, names, ranks)
    for name in [name for name in uneven if own is None and names.get(name) in _AT_THE_ENDS]:
        notes.append(f"  {name} stays whole: {uneven.pop(name)} cannot be divided by {ranks}")
        del names[name]
    tied = [ends for ends in tied if ends[0] in names]
    if uneven:
        shown = listed([f"{name} ({what})" for name, what in uneven.items()], _SHOWN)
        remedy = "use a parallel.tensor that divides these numbers, or remove the modules from Task.tensor_plan"
        raise UsageError(f"{shown} cannot be divided by {ranks}", where=f"parallel.tensor={ranks}", remedy=remedy)
    return ShardingPlan(names, notes, tied, _inside(model, names, where))


def _of_transformers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The plans of the outermost transformers models. Each includes the plans of those inside it."""
    seen: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in seen):
            continue
        # Adapters show the plan of the model inside.
        has_plan = hasattr(type(module), "_tp_plan") or "_tp_plan" in vars(module)
        if has_plan and hasattr(module, "config"):
            prefix = f"{name}." if name else ""
            seen.append(prefix)
            yield from ((f"{prefix}{pattern}", style) for pattern, style in (module._tp_plan or {}).items())


def _matched(model: nn.Module, wanted: Mapping[str, str], where: str, *, is_own: bool) -> dict[str, str]:
    """The style of each module that a pattern matches; of several patterns, the first."""
    modules = [name for name, _ in model.named_modules() if name]
    known = (*CUT, SUMMED, SEQUENCE, SEES)
    found: dict[str, str] = {}
    for pattern, style in wanted.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if style in (SEQUENCE, SEES):  # of a block, and not of all that is in it
            matching = [name for name in matching if name.count(".") == pattern.count(".")]
        if not matching and is_own:
            remedy = f"use patterns over module names, such as: {listed(modules, _SHOWN)}"
            raise UsageError(f"no module matches {pattern!r}", where=where, remedy=remedy)
        if matching and style not in known:
            remedy = f"{did_you_mean(style, known)}known are: {', '.join(known)}"
            raise UsageError(f"{matching[0]} has the unknown style {style!r}", where=where, remedy=remedy)
        for name in matching:
            found.setdefault(name, style)
    return found


def _inside(model: nn.Module, names: Mapping[str, str], where: str) -> dict[str, str]:
    """By name of each module of the plan in a block with `sequence_parallel`: the block."""
    found: dict[str, str] = {}
    blocks = [name for name, style in names.items() if style == SEQUENCE]
    for name, style in names.items():
        around = [block for block in blocks if name.startswith(f"{block}.")]
        is_plain = style in ("colwise", "rowwise") and type(model.get_submodule(name)).forward is nn.Linear.forward
        if (around and not is_plain and style not in (SUMMED, SEES)) or (not around and style == SEES):
            what = f"{name} has the style {style} " + (
                f"in {around[0]}, which has {SEQUENCE}" if around else "in no block"
            )
            remedy = f"in a block with {SEQUENCE}, use colwise, rowwise, {SUMMED} and {SEES}"
            raise UsageError(what, where=where, remedy=remedy)
        if around and style != SUMMED:
            found[name] = around[0]
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    for name, module in model.named_modules():
        if isinstance(module, norms) and any(f"{name}.".startswith(f"{block}.") for block in blocks):
            what, remedy = f"{name} would see only the tokens of one rank", "use LayerNorm or RMSNorm"
            raise UsageError(what, where=where, remedy=remedy)
    return found


def _sharing(model: nn.Module) -> list[set[str]]:
    """Names of the modules that share a parameter, for each such parameter."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    return [names for names in owners.values() if len(names) > 1]


def _check_types(model: nn.Module, names: Mapping[str, str], where: str) -> None:
    for name, style in names.items():
        module = model.get_submodule(name)
        if style in CUT and not isinstance(module, CUT[style][0]):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            what = f"{name} is a {kind}, but {style} shards a torch.nn.{CUT[style][0].__name__}"
            remedy = "name the Linear and Embedding modules inside, or use parallel.tensor=1"
            raise UsageError(what, where=where, remedy=remedy)


def _uneven(model: nn.Module, names: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What cannot be sharded evenly: by name of a module, or of a config, the number that does not divide."""
    found: dict[str, str] = {}
    parents = {name.rpartition(".")[0] for name, style in names.items() if style in ("colwise", "rowwise")}
    for name in sorted(parents):
        module = model.get_submodule(name)
        owners: dict[str, Any] = {name: module}
        if "attention" in type(module).__name__.lower():  # other layers may also have the config
            owners[type(getattr(module, "config", None)).__name__] = getattr(module, "config", None)
        for named, owner in owners.items():
            bad = [f"{key}={getattr(owner, key)}" for key in _HEADS if _is_uneven(getattr(owner, key, None), ranks)]
            if bad:
                found[named] = ", ".join(bad)
    for name, style in names.items():
        key = CUT[style][1] if style in CUT else ""
        number = getattr(model.get_submodule(name), key, None) if key else None
        if _is_uneven(number, ranks):
            found[name] = f"{key}={number}"
    return found


def _is_uneven(number: Any, ranks: int) -> bool:
    return isinstance(number, int) and number % ranks != 0
