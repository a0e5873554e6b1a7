"""The repeated blocks of a model. Each block is sharded, compiled and recomputed by itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.flop_counter import flop_registry

from lockstep.core import devices
from lockstep.core.block_state import BlockState, StateChanges, refusing_writes
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.errors import UsageError, number_of

COMPILED_WITH = "_lockstep_compiled_with"
"""Attribute of a model with compiled blocks: the arguments of `torch.compile`, for what a task compiles itself."""


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The outermost repeated blocks by name, in the model's order.

    The blocks are the modules that `patterns` match, if patterns are given. Without patterns they are modules of the
    classes that a Hugging Face model must not split (`_no_split_modules`). Without these, or if each of these is a
    single layer, they are the members of every `nn.ModuleList` or `nn.Sequential` of two or more modules of one class.
    A module that shares a parameter with the rest of the model is left out: both must use the same tensor.

    Args:
        patterns: shell patterns (`*` and `?`) over names of modules.

    Raises:
        UsageError: a pattern matches no module; names some modules.
    """
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name and _has_forward(module) and any(True for _ in module.parameters())
    }
    if patterns is not None:
        blocks = _matching(candidates, patterns)
    else:
        classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        blocks = {name: module for name, module in candidates.items() if type(module).__name__ in classes}
        blocks = blocks if any(map(_has_layers, blocks.values())) else {}  # those of a ResNet are single convolutions
        repeated = _repeated(model)
        blocks = blocks or {name: module for name, module in candidates.items() if name in repeated}
    outermost: dict[str, nn.Module] = {}
    for name, module in blocks.items():
        if not any(name.startswith(f"{outer}.") for outer in outermost) and module not in outermost.values():
            outermost[name] = module
    return _without_shared_parameters(model, outermost)


def find_ends(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The large embeddings of tokens, and the large last layers. FSDP gathers each by itself, as a block.

    They are what the methods `get_input_embeddings` and `get_output_embeddings` of the model's modules return, as
    transformers' models have them. Left out are ends that share parameters (tied weights), and those with fewer than
    an eighth of the parameters of the largest block, which are not worth a collective.
    """
    least = max((_count(block) for block in blocks), default=math.inf) / 8
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module) for block in blocks for module in block.modules()}
    found = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        ends: dict[str, nn.Module] = {}
        for module in model.modules():
            with contextlib.suppress(NotImplementedError, AttributeError, TypeError):  # no such end, or another method
                end = getattr(module, method)()
                if isinstance(end, nn.Embedding | nn.Linear) and id(end) not in inside and _count(end) >= least:
                    ends[names[id(end)]] = end
        found.append(list(_without_shared_parameters(model, ends).values()))
    return found[0], found[1]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    """True if a module has a forward pass. Lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _has_layers(module: nn.Module) -> bool:
    """True if a module has two layers or more, counted by their matrices."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _matching(modules: dict[str, nn.Module], patterns: Sequence[str]) -> dict[str, nn.Module]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise UsageError(
                f"{pattern!r} matches no module with parameters",
                where="parallel.shard_modules",
                remedy=f"use patterns over the model's module names, such as: {', '.join(list(modules)[:8])}",
            )
    return {name: module for name, module in modules.items() if any(fnmatchcase(name, p) for p in patterns)}


def _repeated(model: nn.Module) -> set[str]:
    """Names of the members of lists that hold two or more modules of one class."""
    names = set()
    for name, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        if is_list and len({type(child) for child in module.children()}) == 1:
            names |= {f"{name}.{key}".lstrip(".") for key, _ in module.named_children()}
    return names


def _without_shared_parameters(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks whose parameters occur nowhere else in the model."""
    parameter_names: dict[int, list[str]] = {}  # all names of each parameter, by id
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter_names.setdefault(id(parameter), []).append(name)
    prefixes: dict[int, tuple[str, ...]] = {}  # all names of each module, by id: a block may occur in several places
    for name, module in model.named_modules(remove_duplicate=False):
        prefixes[id(module)] = (*prefixes.get(id(module), ()), f"{name}.")

    def is_inside(parameter: nn.Parameter, block: nn.Module) -> bool:
        return all(name.startswith(prefixes[id(block)]) for name in parameter_names[id(parameter)])

    return {name: block for name, block in blocks.items() if all(is_inside(p, block) for p in block.parameters())}


def recompute_activations(
    blocks: Sequence[nn.Module], device: torch.device, compute: ComputeConfig, model: nn.Module | None = None
) -> None:
    """Do not keep the activations of the blocks: compute them again in the backward pass.

    This is activation checkpointing (Chen et al. 2016, arXiv:1604.06174). The numbers stay the same, also with dropout,
    BatchNorm and other blocks that change themselves: the random state and the state of the block are restored.

    Args:
        device: on which the blocks compute.
        compute: which blocks, and which of their operations.
        model: has the blocks. With it, a block is refused in its first pass if it writes into other parts of the model.

    Raises:
        UsageError: the model has too few blocks.
    """
    selective, every = compute.activation_checkpointing == "selective", compute.recompute_every_blocks
    if len(blocks) < every:
        what = f"the model has {number_of(len(blocks), 'repeated block')}"
        where = "compute.activation_checkpointing, compute.recompute_every_blocks"
        raise UsageError(what, where=where, remedy="name blocks in parallel.shard_modules, or give a smaller number")
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    for block in blocks[every - 1 :: every]:
        state = BlockState(block, names.get(id(block), ""), model)
        block.forward = partial(_recomputed, block.forward, state, device, selective)


def _is_recomputed(block: nn.Module) -> bool:
    return isinstance(block.forward, partial) and block.forward.func is _recomputed


def _recomputed(
    forward: Callable[..., Any],
    state: BlockState,
    device: torch.device,
    selective: bool,
    /,  # a block may have arguments of these names
    *args: Any,
    **options: Any,
) -> Any:
    contexts: dict[str, Any] = {"context_fn": partial(_contexts, state, device, selective)}
    if torch.compiler.is_compiling():
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _keeps)} if selective else {}
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **options)


def _keeps(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, convolutions and attention, as those that torch counts the operations of.

    Attention with dropout is computed again: if it is left out, later dropout would draw different random numbers.
    """
    packet, schema = getattr(operation, "_overloadpacket", operation), getattr(operation, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    drops = (dict(zip(names, args, strict=False)) | options).get("dropout_p")
    is_dear = packet in flop_registry or any(word in str(packet) for word in ("attention", "flash_attn"))
    return CheckpointPolicy.MUST_SAVE if is_dear and not drops else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(state: BlockState, device: torch.device, selective: bool) -> tuple[Any, Any]:
    """Contexts of a block's forward pass and of its recomputation.

    torch restores the CPU's generator. It restores that of a GPU only if a positional argument is a tensor on it:
    a block that is called with keywords alone would draw a different dropout. It never restores that of mps.
    """
    make: Any = partial(create_selective_checkpoint_contexts, _keeps) if selective else noop_context_fn
    kept, taken = make()
    changes = StateChanges()
    return _noted(state, changes, kept), _as_in_forward(changes, device, devices.of(device).generator_state(), taken)


@contextlib.contextmanager
def _noted(state: BlockState, changes: StateChanges, kept: Any) -> Generator[None, None, None]:
    with state.noted(changes), kept:
        yield


@contextlib.contextmanager
def _as_in_forward(
    changes: StateChanges, device: torch.device, generator_state: Tensor | None, taken: Any
) -> Generator[None, None, None]:
    """Inside, a block is recomputed: the device draws the same random numbers, and the block is as it was.

    Args:
        taken: a context in which results that were kept are taken. It knows the operations of the block only.
    """
    with contextlib.ExitStack() as restored:
        if generator_state is not None:
            restored.enter_context(devices.of(device).restored_generators())
            devices.of(device).set_generator_state(generator_state)
        restored.enter_context(changes.undone())
        restored.enter_context(taken)
        yield


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, as a function that torch compiles whatever the class of the module is.

    `Module.compile` compiles nothing if the class is torch's own, such as `nn.Sequential` (torch 2.13).
    """
    if not type(module).forward.__module__.startswith("torch."):
        return module._call_impl
    inside: Any = module._call_impl

    def call(*args: Any, **options: Any) -> Any:
        return inside(*args, **options)

    call.__code__ = call.__code__.replace()  # with its own cache: torch compiles a code for few modules only
    return call


def compile_modules(model: nn.Module, blocks: Sequence[nn.Module], compute: ComputeConfig) -> None:
    """Compile the model or its blocks with `torch.compile`, in place: the names of parameters stay.

    Raises:
        UsageError: the backend is unknown, the model has no blocks to compile, or torch cannot compile it as a whole.
    """
    what, backend = compute.compile, compute.compile_backend
    if what == "auto":
        what = "blocks" if blocks else "model"
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        problem = f"torch.compile has no backend {backend!r}"
        raise UsageError(problem, where="compute.compile_backend", remedy=f"there are: {known}")
    if what == "blocks" and not blocks:
        raise UsageError(
            "the model has no repeated blocks",
            where="compute.compile=blocks",
            remedy="name them in parallel.shard_modules, or use model",
        )
    with_buffers = [block for block in blocks if _is_recomputed(block) and any(True for _ in block.buffers())]
    if what == "model" and with_buffers:
        raise UsageError(
            f"torch cannot compile the recomputation of blocks with buffers ({type(with_buffers[0]).__name__})",
            where="compute.compile=model, compute.activation_checkpointing=true",
            remedy="use compute.compile=blocks, or leave out one of the two",
        )
    mode = None if compute.compile_mode == "default" else compute.compile_mode
    options: dict[str, Any] = {"backend": backend, "mode": mode, "dynamic": compute.compile_dynamic}
    if what == "blocks":
        setattr(model, COMPILED_WITH, options)
    for module in blocks if what == "blocks" else [model]:
        if module in with_buffers:  # compiled code runs inside the recomputation, which is as it was
            recomputed: Any = module.forward
            recomputed.args[1].is_compiled = True
            module.forward = partial(_recomputed, torch.compile(recomputed.args[0], **options), *recomputed.args[1:])
        else:
            names = {id(one): name for name, one in model.named_modules()}
            inside = {names[id(one)]: one for one in module.modules() if _is_recomputed(one)}
            compiled = torch.compile(call_of(module), **options)
            module._compiled_call_impl = refusing_writes(compiled, inside) if inside else compiled
