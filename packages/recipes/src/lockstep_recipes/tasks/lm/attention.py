"""Attention within documents: SDPA with a mask, flex attention with a block mask, or flash attention over documents."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.blocks import COMPILED_WITH
from lockstep.core.errors import UsageError, described

_SIMILAR = 1.25  # ratio of lengths in a group: more groups need more calls, fewer groups more padding
_WIDEST = 256  # width of a head for flash attention
_HALVES = (torch.bfloat16, torch.float16)
_CAPABILITY = (8, 0)  # of an NVIDIA GPU, from which flash attention has a backward pass
_APART = 0.02  # of the 2-norm: roundings of 16 bits stay below a fourth of it
_OF_TRANSFORMERS = {"flex": "flex_attention", "flash": "flash_attention_2"}


class PackedSequences(NamedTuple):
    """Documents one after another, over all rows."""

    begins: Tensor
    """The first position of each, then the number of positions: int32 (documents + 1)."""
    longest: int
    """The maximum length of a document."""


def begins_of(positions: Tensor) -> Tensor:
    """`PackedSequences.begins` from positions in documents, (rows, tokens). Each padding token has position 0, and is
    its own document."""
    begins = (positions.flatten() == 0).nonzero().flatten()
    return torch.cat([begins, torch.tensor([positions.numel()])]).int()


class Groups(NamedTuple):
    """Documents of similar length, each treated as a separate row. Positions are counted over all rows."""

    taken: Tensor
    """The position of each entry of the groups, one group after another. A shorter document repeats its last
    position."""
    back: Tensor
    """The index of each position in the groups: (positions)."""
    shapes: list[tuple[int, int]]
    """The number of documents of each group, and the length of the longest."""


def groups_of(positions: Tensor) -> Groups:
    """Groups of documents from positions in documents, (rows, tokens)."""
    begins = begins_of(positions).long()
    lengths, begins = begins.diff(), begins[:-1]
    left = lengths.argsort(descending=True, stable=True)
    back, taken, shapes, size = torch.empty(positions.numel(), dtype=torch.int64), [], [], 0
    while len(left):
        longest = int(lengths[left[0]])
        chosen = left[: int((lengths[left] * _SIMILAR >= longest).sum())]
        left = left[len(chosen) :]
        within = torch.arange(longest).expand(len(chosen), -1)
        places = begins[chosen, None] + within.minimum(lengths[chosen, None] - 1)
        is_own = within < lengths[chosen, None]
        back[places[is_own]] = torch.arange(size, size + places.numel()).view_as(places)[is_own]
        taken.append(places.flatten())
        shapes.append((len(chosen), longest))
        size += places.numel()
    return Groups(torch.cat(taken), back, shapes)


def document_mask(documents: Tensor) -> Tensor:
    """The mask in which each token sees itself and the earlier tokens of its document.

    Args:
        documents: the document number of each token: (samples, tokens).

    Returns:
        (samples, 1, tokens, tokens).
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


def block_mask(documents: Tensor) -> Any:
    """`document_mask` for flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[row, query] == documents[row, key]) & (query >= key)

    rows, tokens = documents.shape
    return create_block_mask(sees, rows, None, tokens, tokens, device=documents.device)


def mask_for(kind: str, model: nn.Module, batch: dict[str, Any]) -> Any:
    """What a model needs to know about the documents in a batch. None: rows are documents, or positions are sufficient.

    Args:
        kind: `task.attention`. In evaluations without CUDA, SDPA is used instead. `auto`: see `_best`.

    Raises:
        UsageError: this kind of attention cannot train on the device.
    """
    device = batch["input_ids"].device
    kind = _best(model, batch) if kind == "auto" else kind
    if model.training and kind != "sdpa" and not has_kernels(device):
        what = f"{kind} attention has no backward pass on {device.type}"
        raise UsageError(what, where=f"task.attention={kind}", remedy="use task.attention=sdpa, or a GPU with CUDA")
    documents = batch.get("documents")
    if documents is None or finds_documents(model):
        return None
    if kind == "sdpa" or not has_kernels(device):
        is_own = device.type == "cpu" and hasattr(model, "takes_groups")
        return groups_of(batch["positions"]) if is_own else document_mask(documents)
    return PackedSequences(batch["begins"], documents.shape[1]) if kind == "flash" else block_mask(documents)


def _best(model: nn.Module, batch: dict[str, Any]) -> str:
    """`flash` if a trial on this device gave what SDPA with a mask gives. Otherwise `sdpa`.

    Compiled blocks would be compiled again for each number of documents.
    """
    device = batch["input_ids"].device
    is_compiled = hasattr(model, COMPILED_WITH) or getattr(model, "_compiled_call_impl", None) is not None
    if is_compiled or not has_kernels(device) or not hasattr(model, "takes_groups") or "begins" not in batch:
        return "sdpa"
    dtype = next(model.parameters()).dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    config: Any = model.config
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return "sdpa" if dtype not in _HALVES or _fault_of_flash(device, dtype, *sizes) else "flash"


@functools.cache
def _fault_of_flash(device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int) -> str:
    """Why flash attention over documents must not train on a device. Empty: it gave what SDPA with a mask gives.

    The trial has two rows of several documents, and no effect on the generators of random numbers.
    """
    try:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
            fault = f"{torch.cuda.get_device_name(device)} is too old for it"
        else:
            with torch.autocast(device.type, enabled=False), torch.enable_grad():
                found = max(_distances(device, dtype, heads, shared, width))
            fault = "" if found < _APART else f"it differs from attention with a mask by {found:.2g} of its norm"
    except Exception as error:
        fault = described(error)
    if fault:
        warnings.warn(f"task.attention=auto uses a mask instead of flash attention: {fault}", stacklevel=2)
    return fault


def _distances(device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int) -> list[float]:
    """The relative distances of flash attention from SDPA with a mask: of the result and of the three gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[37, 1, 90], [5, 64, 59]]
    documents = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths])
    positions = torch.cat([torch.arange(length) for row in lengths for length in row])
    packed = PackedSequences(begins_of(positions).to(device), documents.shape[1])

    def drawn(heads: int) -> Tensor:
        return torch.randn(len(documents), heads, documents.shape[1], width, generator=generator).to(device, dtype)

    query, key, value, above = drawn(heads), drawn(shared), drawn(shared), drawn(heads)
    results = []
    for mask in (packed, document_mask(documents.to(device))):
        inputs = [part.clone().requires_grad_() for part in (query, key, value)]
        if isinstance(mask, Tensor):
            inputs = [part.detach().float().requires_grad_() for part in inputs]
        mixed = attend(inputs[0], inputs[1], inputs[2], mask, False)
        results.append([mixed, *torch.autograd.grad(mixed, inputs, above.to(mixed.dtype))])
    pairs = ((one, other.detach()) for one, other in zip(*results, strict=True))
    return [float((one.detach().float() - other).norm() / other.norm()) for one, other in pairs]


def has_kernels(device: torch.device) -> bool:
    """True if flex and flash attention can train on a device."""
    return device.type == "cuda"


def use(model: nn.Module, kind: str) -> None:
    """Make a transformers model use this kind of attention, if CUDA is available.

    Raises:
        UsageError: the model or this machine does not support it.
    """
    if kind in ("auto", "sdpa") or not torch.cuda.is_available():
        return
    try:
        model.set_attn_implementation(_OF_TRANSFORMERS[kind])  # type: ignore[operator]
    except (ImportError, ValueError) as error:
        what = f"{type(model).__name__} cannot use it: {str(error).splitlines()[0]}"
        remedy = "use task.attention=sdpa, or pip install flash-attn for flash"
        raise UsageError(what, where=f"task.attention={kind}", remedy=remedy) from error


def finds_documents(model: nn.Module) -> bool:
    """True if a model must find documents by their positions: some layers see a window of tokens instead of all earlier
    tokens, or its attention does not accept a mask of tokens by tokens."""
    config = getattr(model, "config", None)
    has_windows = config is not None and getattr(config.get_text_config(), "sliding_window", None)
    return bool(has_windows) or getattr(config, "_attn_implementation", None) in _OF_TRANSFORMERS.values()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool) -> Tensor:
    """Attention: (samples, heads, tokens, width), as its arguments.

    Args:
        key, value: may have fewer heads, which groups of consecutive query heads share.
        mask: from `mask_for`, or a mask as SDPA takes it. None: see `is_causal`.

    Raises:
        UsageError: flash attention was called with numbers that have more than 16 bits.
    """
    copies = int(query.shape[1] // key.shape[1])  # while torch.jit traces, sizes are tensors
    shares = copies > 1
    if mask is None or isinstance(mask, Tensor):
        if shares and not _shares_heads(value, mask):
            shares, (key, value) = False, (part.repeat_interleave(copies, dim=1) for part in (key, value))
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": shares}
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    if isinstance(mask, Groups):
        return _by_document(query, key, value, mask)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast does not know these functions
    if not isinstance(mask, PackedSequences):
        of_flex = {"block_mask": mask, "enable_gqa": shares}
        return _flex(value.device)(query, key, value, **of_flex)  # type: ignore[no-any-return]
    from torch.nn.attention.varlen import varlen_attn

    if value.dtype not in _HALVES:
        what = f"flash attention computes in 16 bits, not in {str(value.dtype).removeprefix('torch.')}"
        raise UsageError(what, where="task.attention=flash", remedy="use precision=bf16, or task.attention=flex")
    flat = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    places: Any = (mask.begins, mask.begins, mask.longest, mask.longest)
    # Each token sees itself and those before it. Without splits, other documents do not change a document's bits.
    of_flash: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": shares}
    of_flash |= {"num_splits": 1} if _has_splits() else {}
    attention: Any = functools.partial(varlen_attn, **of_flash)
    mixed: Tensor = attention(*flat, *places).unflatten(0, (len(value), -1)).transpose(1, 2)
    return mixed


@functools.cache
def _has_splits() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "num_splits" in inspect.signature(varlen_attn).parameters  # torch 2.11 may lack it


def _shares_heads(value: Tensor, mask: Tensor | None) -> bool:
    """True if SDPA has a fast kernel that lets query heads share keys and values, so that no copies are needed.

    On CUDA this is flash attention, which takes no mask (torch 2.13). Otherwise SDPA would use its slow fallback.
    """
    if value.device.type == "cuda":
        fits = mask is None and value.dtype == torch.bfloat16 and value.shape[-1] <= _WIDEST
        return fits and bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]
    return value.device.type == "cpu"


def _by_document(query: Tensor, key: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """Attention of each document separately. On a CPU, this is faster than a mask, which also computes what it
    hides."""
    sizes = [count * longest for count, longest in groups.shapes]
    flat = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    parts = [torch.split(part.index_select(0, groups.taken), sizes) for part in flat]
    mixed = []
    for number, (count, longest) in enumerate(groups.shapes):
        own_query, own_key, own_value = [part[number].unflatten(0, (count, longest)).transpose(1, 2) for part in parts]  # type: ignore[no-untyped-call]
        mixed.append(attend(own_query, own_key, own_value, None, True).transpose(1, 2).flatten(0, 1))
    rows, heads, tokens, width = query.shape
    return torch.cat(mixed).index_select(0, groups.back).view(rows, tokens, heads, width).transpose(1, 2)


@functools.cache
def _flex(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if has_kernels(device) else flex_attention


def rotations(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of each position: (samples, 1, tokens, width). Su et al. 2021, arXiv:2104.09864."""
    rates = base ** -(torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = (positions[..., None].float() * rates).repeat(1, 1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys, rotated by their positions. Element i forms a pair with element i + width / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * turns[0] + torch.cat([-second, first], dim=-1) * turns[1]
