"""Cross-entropy of the next token, for all tokens at once, or in chunks so that all logits are never in memory.

On a mesh, the last layer may be sharded over the vocabulary. Each rank then has the logits of its words, and ranks
exchange two numbers per token (Shoeybi et al. 2019, arXiv:1909.08053, section 3). No rank has the logits of all words.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.parallel.sharded_tensor import local
from lockstep_recipes.tasks.lm.data import NOT_LEARNED

_FEWEST = 512  # minimum tokens of a chunk: with fewer, matrix products are slow
_LOGITS = {"cpu": 2**21}  # logits of a chunk: 8 MB in float32, which fits into caches
_LOGITS_ELSEWHERE = 2**26


def chunk_for(vocabulary: int, device: torch.device) -> int:
    """The number of tokens of a chunk that suits a vocabulary and a device."""
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


def total_in_chunks(head: nn.Linear, hidden: Tensor, targets: Tensor, chunk: int, of_chunk: Any = None) -> Tensor:
    """`total(head(hidden), targets)`, with only the logits of `chunk` tokens in memory at a time.

    The gradient of each chunk is computed with its loss, so logits are computed once. The sum is the same up to
    rounding. All chunks are one call of `head`, so that FSDP gathers its weights once, and equally often on all ranks.

    Args:
        hidden: (tokens, width).
        of_chunk: `compiled`, or None for `with_gradient` as it is written.
    """
    forward, called = head.forward, cast(Any, head)
    apply: Any = _InChunks.apply
    if (group := _group_of(head)) is not None:
        of_group = partial(_with_gradient_of_group, group=group)
        return cast(Tensor, apply(None, of_group, chunk, targets, hidden, *_part_of(head), group))

    def of_all(hidden: Tensor) -> Any:
        return apply(forward, of_chunk or with_gradient, chunk, targets, hidden, head.weight, head.bias, None)

    called.forward = of_all
    try:
        summed: Tensor = head(hidden)
    finally:
        called.forward = forward
    return summed


class _InChunks(torch.autograd.Function):
    """The loss, with its gradients with respect to the hidden tokens and the weights and bias of the last layer."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Any,
        of_chunk: Any,
        chunk: int,
        targets: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[4:7]
        head = head or partial(functional.linear, weight=weight, bias=bias)
        by_part: list[Tensor] = []
        by_weight = wide(torch.zeros_like(weight)) if of_weight else None  # 16 bits are too few for the sum of chunks
        by_bias = wide(torch.zeros_like(bias)) if bias is not None and of_bias else None
        losses: list[Tensor] = []
        for part, wanted in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            loss, gradient = of_chunk(head(part), wanted)
            losses.append(loss)
            learned = (wanted != NOT_LEARNED)[:, None]  # a mask of hidden tokens is much smaller than one of logits
            by_part += [gradient @ weight * learned] if of_hidden else []
            if by_weight is not None and by_weight.dtype == gradient.dtype:
                by_weight.addmm_(gradient.T, (part * learned).to(gradient.dtype))
            elif by_weight is not None:
                by_weight.add_(gradient.T @ (part * learned))
            if by_bias is not None:
                by_bias.add_((gradient * learned).sum(dim=0))
        ctx.dtypes = [tensor.dtype for tensor in (hidden, weight, weight if bias is None else bias)]
        by_hidden = torch.cat(by_part) if of_hidden else None
        if group is not None and by_hidden is not None:  # each rank has the contribution of its words
            group.add(by_hidden)
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = (None if gradient is None else (wide(gradient) * factor).to(dtype) for gradient, dtype in pairs)
        return None, None, None, None, *found, None


def with_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`total(logits, targets)`, and its gradient with respect to the logits, in their number format.

    The gradient of tokens that are not learned is not 0: the caller masks what it computes from it. A gradient of 16
    bits is rounded once, with the 1 of the target subtracted before.
    """
    wanted = targets.clamp(min=0)[:, None]
    scores = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = scores.gather(1, wanted)
    loss = -(chosen * (targets != NOT_LEARNED)[:, None]).sum()
    if scores.dtype == logits.dtype:
        return loss, scores.exp_().scatter_add_(1, wanted, -torch.ones_like(chosen))
    gradient = torch.exp(scores, out=torch.empty_like(logits))  # one pass on GPUs, where exp_ and a cast are two
    return loss, gradient.scatter_(1, wanted, chosen.exp_().sub_(1).to(gradient.dtype))


@cache
def compiled(**options: Any) -> Any:
    """`with_gradient`, compiled with the arguments of `torch.compile`: one or two kernels for a chunk."""
    return torch.compile(with_gradient, **options)


def by_token_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`by_token(head(hidden), targets)`, with only the logits of `chunk` tokens in memory at a time."""
    pairs = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    if (group := _group_of(head)) is not None:
        weight, bias = _part_of(head)
        found = (_by_token_of_group(functional.linear(part, weight, bias), wanted, group) for part, wanted in pairs)
    else:
        found = (by_token(head(part), wanted) for part, wanted in pairs)
    losses, right = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(right)


# ---- a vocabulary that is sharded over a tensor group


def _group_of(head: nn.Module) -> Any:
    """The `mesh.group.TensorGroup` that shards a last layer over the vocabulary. None: it is not sharded."""
    return getattr(head, "tensor_group", None)


def _part_of(head: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of this rank's words."""
    return local(head.weight), None if head.bias is None else local(head.bias)


def _agreed(logits: Tensor, targets: Tensor, group: Any, *more: Tensor) -> tuple[Tensor, ...]:
    """What a tensor group computes together from the logits of each rank's words.

    Args:
        logits: (tokens, words of this rank). targets: (tokens).
        more: numbers of this rank, (tokens), to share with all ranks.

    Returns:
        the logarithm of the sum of exponentials over all words, and the logit of the target, 0 if it is not learned:
        (tokens). The index of the target among this rank's words, and whether it is one of them: (tokens, 1). `more` of
        each rank: (ranks, numbers, tokens).
    """
    width = logits.shape[-1]
    place = (targets - group.rank * width)[:, None]
    is_here = (place >= 0) & (place < width)
    place = place.clamp(0, width - 1)
    chosen = torch.where(is_here, logits.gather(1, place), 0)[:, 0]
    known = group.gather(torch.stack([logits.logsumexp(dim=-1), chosen, *more]))
    return known[:, 0].logsumexp(dim=0), known[:, 1].sum(dim=0), place, is_here, known[:, 2:]


def _with_gradient_of_group(logits: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """`with_gradient`, from the logits of this rank's words, and for them."""
    exact = wide(logits)
    sums, chosen, place, is_here, _ = _agreed(exact, targets, group)
    loss = ((sums - chosen) * (targets != NOT_LEARNED)).sum()
    gradient = (exact - sums[:, None]).exp_().scatter_add_(1, place, -is_here.to(exact.dtype))
    return loss, gradient.to(logits.dtype)


def _by_token_of_group(logits: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """`by_token`, from the logits of this rank's words."""
    logits = wide(logits)
    best, word = logits.max(dim=-1)
    first = group.rank * logits.shape[-1]  # in float32, a word index is exact up to 2^24
    sums, chosen, _, _, others = _agreed(logits, targets, group, best, (word + first).to(logits.dtype))
    winner = others[:, 0].argmax(dim=0, keepdim=True)  # the first of equal ones, as in one process
    right = others[:, 1].gather(0, winner)[0] == targets
    return (sums - chosen).masked_fill(targets == NOT_LEARNED, 0), right
