"""Cross-entropy of the next token, of all tokens at once or in chunks that never hold all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lockstep.tasks.lm.data import NOT_LEARNED


def wide(logits: Tensor) -> Tensor:
    """Logits in at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def total(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the loss over the learned tokens.

    Args:
        logits: (tokens, vocabulary).
        targets: (tokens).
    """
    return functional.cross_entropy(wide(logits), targets, ignore_index=NOT_LEARNED, reduction="sum")


def by_token(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether its target is the most probable token: (tokens)."""
    logits = wide(logits)
    losses = functional.cross_entropy(logits, targets, ignore_index=NOT_LEARNED, reduction="none")
    return losses, logits.argmax(dim=-1) == targets


def total_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """`total(head(hidden), targets)`, where only the logits of `chunk` tokens are there at a time.

    The backward pass computes the logits of each chunk again. The sum is the same to rounding. All chunks are one call
    of `head`, so that FSDP gathers its weights once, and all ranks equally often.

    Args:
        hidden: (tokens, width).
    """
    forward = head.forward

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return total(forward(part), wanted)

    def of_all(hidden: Tensor) -> Tensor:
        pairs = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        parts: list[Any] = [checkpoint(of_chunk, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(parts).sum()

    head.forward = of_all
    try:
        summed: Tensor = head(hidden)
    finally:
        head.forward = forward
    return summed


def by_token_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`by_token(head(hidden), targets)`, where only the logits of `chunk` tokens are there at a time."""
    pairs = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    losses, right = zip(*(by_token(head(part), wanted) for part, wanted in pairs), strict=True)
    return torch.cat(losses), torch.cat(right)
