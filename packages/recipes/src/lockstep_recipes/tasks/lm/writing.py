"""Generate texts: continue a batch of prompts token by token, with the cached keys and values of all earlier tokens."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep_recipes.tasks.lm import attention, models

NOTHING = -1
"""Fills positions after the end of a text."""
NO_PROMPT = -2
"""Fills rows that have fewer prompts than other rows."""
_LOOK_EVERY = 16  # tokens between checks whether all texts have ended: each check waits for the device


def room_for(limit: int | None, new_tokens: int) -> tuple[int | None, int]:
    """The maximum number of tokens of a prompt, whose last tokens are kept, and of new tokens after it.

    Args:
        limit: the number of positions of the model. None: unlimited.
    """
    if limit is None:
        return None, new_tokens
    kept = max(limit - new_tokens, limit // 2)
    return kept, limit - kept


def prepare_prompts(
    prompts: Sequence[Sequence[int]], *, new_tokens: int, padding: int, greedy: Sequence[bool] = ()
) -> dict[str, Tensor]:
    """A batch of prompts: `prompt_ids` and `prompt_mask` (prompts, tokens), padded on the left, and `draws`.

    `draws` are the random numbers for the new tokens: (prompts, new tokens), from 0 to 1. They depend only on the
    prompt, so a text is the same in any batch, on any rank.

    Args:
        greedy: true for prompts that are continued with the most probable tokens; their random numbers are 0.
    """
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    draws = torch.empty(len(prompts), new_tokens)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
        seed = zlib.crc32(torch.tensor(prompt).numpy().tobytes())
        draws[row] = torch.rand(new_tokens, generator=torch.Generator().manual_seed(seed))
        draws[row] *= not (greedy and greedy[row])
    return {"prompt_ids": ids, "prompt_mask": mask, "draws": draws}


@torch.no_grad()
def write(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    draws: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    end: int | None,
    put: Callable[[Tensor], object] = lambda tokens: None,
) -> Tensor:
    """Continue prompts.

    Args:
        ids, mask, draws: as `prepare_prompts` returns them.
        temperature: the sampling temperature; 0 takes the most probable token.
        top_k: sample from this many most probable tokens. None: from all.
        end: the token that ends a text.
        put: called with the next token of each prompt, (prompts), as soon as they are drawn.

    Returns:
        new tokens: (prompts, new tokens). `NOTHING` fills positions after the end of a text.
    """
    draw = functools.partial(_drawn, temperature=temperature, top_k=top_k)
    if not takes_keys(model):
        each = zip(ids, mask, draws, strict=True)
        return torch.stack([_write_alone(model, *parts, draw, end, put) for parts in each])
    written: list[Tensor] = []
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    seen: Any = None
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    for number in range(draws.shape[1]):
        given = mask.long() if attention.finds_documents(model) else _mask_of(mask, ids.shape[1])
        output = models.called(model, ids, positions, given, past_key_values=seen, use_cache=True)
        seen = output.past_key_values
        token = draw(output.logits[:, -1], draws[:, number])
        if end is not None:
            ended = ended | (token == end)
        written.append(token.masked_fill(ended, NOTHING))
        put(written[-1])
        if number % _LOOK_EVERY == _LOOK_EVERY - 1 and bool(ended.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    texts = torch.stack(written, dim=1)
    rest = texts.new_full((len(texts), draws.shape[1] - texts.shape[1]), NOTHING)
    return torch.cat([texts, rest], dim=1)


def takes_keys(model: nn.Module) -> bool:
    """True if a model accepts the keys and values of earlier tokens, and the positions of padded rows."""
    takes = inspect.signature(model.forward).parameters
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    return {"past_key_values", "position_ids"} <= takes.keys() or (has_any and "input_ids" not in takes)


def _write_alone(
    model: nn.Module, ids: Tensor, mask: Tensor, draws: Tensor, draw: Any, end: int | None, put: Any
) -> Tensor:
    """The continuation of one prompt, without cached keys and values: (new tokens)."""
    text, count = ids[mask], int(mask.sum())
    for number in draws[:, None]:
        token = draw(models.called(model, text[None]).logits[:, -1], number)
        if end is not None and int(token) == end:
            break
        text = torch.cat([text, token])
        put(token)
    found = torch.full_like(draws, NOTHING, dtype=torch.int64)
    found[: len(text) - count] = text[count:]
    return found


def _mask_of(mask: Tensor, queries: int) -> Tensor:
    """Turn a mask by token into the mask of the last `queries` tokens. Padding sees itself, so that it does not become
    NaN."""
    total = mask.shape[1]
    causal = torch.ones(queries, total, dtype=torch.bool, device=mask.device).tril(total - queries)
    itself = torch.eye(total, dtype=torch.bool, device=mask.device)[total - queries :]
    return (causal & mask[:, None, None, :]) | itself


def _drawn(logits: Tensor, draws: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """A token for each row of logits: (samples)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    values, tokens = logits.float().topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    until = (values / temperature).softmax(dim=-1).cpu().cumsum(dim=-1)  # CUDA has no deterministic cumsum
    place = (until < draws.cpu()[:, None] * until[:, -1:]).sum(dim=-1, keepdim=True)
    return tokens.gather(1, place.to(tokens.device)).squeeze(1)
