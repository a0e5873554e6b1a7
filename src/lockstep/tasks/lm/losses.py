"""Cross-entropy of the next token, of all tokens at once or in chunks that never hold all logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.tasks.lm.data import NOT_LEARNED

_FEWEST = 512  # tokens of a chunk: with fewer, matrix products are slow
_LOGITS = {"cpu": 2**21}  # of a chunk: 8 MB in float32, which caches hold
_LOGITS_ELSEWHERE = 2**26


def chunk_for(vocabulary: int, device: torch.device) -> int:
    """The tokens of a chunk that suit a vocabulary and a device."""
    return max(_FEWEST, _LOGITS.get(device.type, _LOGITS_ELSEWHERE) // vocabulary)


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


def total_in_chunks(head: nn.Linear, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """`total(head(hidden), targets)`, where only the logits of `chunk` tokens are there at a time.

    The gradient of each chunk is computed with its loss, so logits are computed once. The sum is the same to rounding.
    All chunks are one call of `head`, so that FSDP gathers its weights once, and all ranks equally often.

    Args:
        hidden: (tokens, width).
    """
    forward, called = head.forward, cast(Any, head)

    def of_all(hidden: Tensor) -> Any:
        apply: Any = _InChunks.apply
        return apply(forward, chunk, targets, hidden, head.weight, head.bias)

    called.forward = of_all
    try:
        summed: Tensor = head(hidden)
    finally:
        called.forward = forward
    return summed


class _InChunks(torch.autograd.Function):
    """The loss, with its gradients by the hidden tokens and by the weights and the bias of the last layer."""

    @staticmethod
    def forward(
        ctx: Any, head: Any, chunk: int, targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[3:]
        by_part: list[Tensor] = []
        by_weight = wide(torch.zeros_like(weight)) if of_weight else None  # 16 bits are too few for the sum of chunks
        by_bias = wide(torch.zeros_like(bias)) if bias is not None and of_bias else None
        losses: list[Tensor] = []
        for part, wanted in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            logits = head(part)
            loss, gradient = _with_gradient(wide(logits), wanted)
            losses.append(loss)
            gradient = gradient.to(logits.dtype)
            by_part += [gradient @ weight] if of_hidden else []
            if by_weight is not None and by_weight.dtype == gradient.dtype:
                by_weight.addmm_(gradient.T, part.to(gradient.dtype))
            elif by_weight is not None:
                by_weight.add_(gradient.T @ part)
            if by_bias is not None:
                by_bias.add_(gradient.sum(dim=0))
        ctx.dtypes = [tensor.dtype for tensor in (hidden, weight, weight if bias is None else bias)]
        ctx.save_for_backward(torch.cat(by_part) if of_hidden else None, by_weight, by_bias)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = (None if gradient is None else (wide(gradient) * factor).to(dtype) for gradient, dtype in pairs)
        return None, None, None, *found


def _with_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`total(logits, targets)`, and its gradient by the logits."""
    learned = (targets != NOT_LEARNED).to(logits.dtype)[:, None]
    wanted = targets.clamp(min=0)[:, None]
    scores = logits.log_softmax(dim=-1)
    loss = -(scores.gather(1, wanted) * learned).sum()
    gradient = scores.exp_().scatter_add_(1, wanted, -torch.ones_like(learned)).mul_(learned)
    return loss, gradient


def by_token_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`by_token(head(hidden), targets)`, where only the logits of `chunk` tokens are there at a time."""
    pairs = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    losses, right = zip(*(by_token(head(part), wanted) for part, wanted in pairs), strict=True)
    return torch.cat(losses), torch.cat(right)
