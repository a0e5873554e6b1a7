"""The repeated blocks of a model: what is sharded, compiled and recomputed one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError

CompileName = Literal["blocks", "model"]


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Outermost blocks by name, in the model's order.

    By `patterns` over module names (`*` and `?`) where given; else the classes that a Hugging Face model must not split
    (`_no_split_modules`); else the members of every `nn.ModuleList` or `nn.Sequential` of two or more modules of one class.
    A block that shares a parameter with the rest of the model is none: both must see the same tensor.

    Raises:
        UsageError: a pattern matches no module; names some.
    """
    named = [
        (name, module)
        for name, module in model.named_modules()
        if name and _is_callable(module) and any(True for _ in module.parameters())
    ]
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                remedy = (
                    f"use patterns over the model's module names, such as: {', '.join([name for name, _ in named][:8])}"
                )
                raise UsageError(
                    f"{pattern!r} matches no module with parameters", where="parallel.shard_modules", remedy=remedy
                )
        found = {name: module for name, module in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    else:
        classes = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
        found = {name: module for name, module in named if type(module).__name__ in classes}
        repeated = _repeated(model)
        found = found or {name: module for name, module in named if name in repeated}
    outer: dict[str, nn.Module] = {}
    for name, module in found.items():
        if not any(name.startswith(f"{other}.") for other in outer) and module not in outer.values():
            outer[name] = module
    places: dict[int, list[str]] = {}  # of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    paths: dict[int, tuple[str, ...]] = {}  # of each module: the same block may stand in several places
    for name, module in model.named_modules(remove_duplicate=False):
        paths[id(module)] = (*paths.get(id(module), ()), f"{name}.")
    return {
        name: block
        for name, block in outer.items()
        if all(_inside(places[id(p)], paths[id(block)]) for p in block.parameters())
    }


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a forward pass; lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _inside(places: Sequence[str], paths: tuple[str, ...]) -> bool:
    return all(place.startswith(paths) for place in places)


def _repeated(model: nn.Module) -> set[str]:
    names = set()
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.ModuleList, nn.Sequential))
            and len(module) > 1
            and len({type(child) for child in module}) == 1
        ):
            names |= {f"{name}.{key}".lstrip(".") for key, _ in module.named_children()}
    return names


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Free what a block computes in its forward pass, and compute it again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    The same numbers, also with dropout and BatchNorm: random state and buffers are put back.

    Raises:
        UsageError: the model has no blocks.
    """
    if not blocks:
        remedy = "name them in parallel.shard_modules"
        raise UsageError("the model has no repeated blocks", where="compute.activation_checkpointing", remedy=remedy)
    for block in blocks:
        contexts: dict[str, Any] = (
            {"context_fn": partial(_contexts, block)} if any(True for _ in block.buffers()) else {}
        )
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def _contexts(
    block: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _buffers_kept(block)


@contextlib.contextmanager
def _buffers_kept(block: nn.Module) -> Generator[None, None, None]:
    """Around the second time: running statistics have moved already."""
    before = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:  # torch leaves the second time by an exception when it has all that it needs
        with torch.no_grad():
            for buffer, old in zip(block.buffers(), before, strict=True):
                buffer.copy_(old)


def compile_modules(model: nn.Module, blocks: Sequence[nn.Module], what: CompileName, backend: str) -> None:
    """`torch.compile` in place, so that names of parameters stay.

    Raises:
        UsageError: an unknown backend, or blocks where the model has none.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UsageError(
            f"torch.compile has no backend {backend!r}", where="compute.compile_backend", remedy=f"there are: {known}"
        )
    if what == "blocks" and not blocks:
        raise UsageError(
            "the model has no repeated blocks",
            where="compute.compile=blocks",
            remedy="name them in parallel.shard_modules, or use model",
        )
    for module in blocks if what == "blocks" else [model]:
        module.compile(backend=backend)
