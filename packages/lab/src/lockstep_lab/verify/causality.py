"""Does the prediction of a token change with later tokens? Then the model reads its target among its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_FEWEST_TARGETS = 8
_ROUNDING = 1e-5


class _Calls(TorchFunctionMode):
    """Inside, the tokens of embeddings are recorded, and the outputs and targets of cross-entropies.

    Args:
        changed: the number of an embedding call, and the tokens that it gets instead.
    """

    def __init__(self, changed: tuple[int, Tensor] | None = None) -> None:
        super().__init__()
        self.changed = changed
        self.tokens: list[Tensor] = []
        self.compared: list[tuple[Tensor, Tensor, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.embedding:
            self.tokens.append(args[0])
            if self.changed is not None and len(self.tokens) == self.changed[0] + 1:
                args = (self.changed[1], *args[1:])
        options = dict(kwargs or {})
        if func in (functional.cross_entropy, functional.nll_loss):
            self.compared.append((args[0], args[1], options.get("ignore_index", -100)))
        return func(*args, **options)


def sees_future(loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """The position whose output changes with the next token, if that is its target; empty: none is known.

    Targets are next tokens if they are an input shifted by one. Positions without a target may see all tokens, such as
    the prefix of a prefix language model.
    """
    with torch.no_grad(), _Calls() as calls:
        loss(model, batch)
        for number, tokens in enumerate(calls.tokens):
            for place, (outputs, targets, ignored) in enumerate(calls.compared):
                position = _most_targets(tokens, targets, ignored)
                if not position:
                    continue
                changed = tokens.clone()
                changed[:, position:] = tokens.max() + tokens.min() - tokens[:, position:]
                with _Calls((number, changed)) as again:
                    loss(model, batch)
                before, after = (
                    _at(one, targets, position - 1, len(tokens)) for one in (outputs, again.compared[place][0])
                )
                if float((after - before).abs().max()) > _ROUNDING * float(before.abs().max()):
                    return f"the output at position {position} changes with the input at position {position + 1}"
    return ""


def _most_targets(tokens: Tensor, targets: Tensor, ignored: int) -> int:
    """The number of tokens up to the position with the most targets, if targets are the next tokens; else 0."""
    if tokens.ndim != 2 or targets.is_floating_point() or targets.numel() % len(tokens):
        return 0
    rows = targets.reshape(len(tokens), -1)
    count = min(rows.shape[1], tokens.shape[1] - 1)
    rows, valid = rows[:, :count], rows[:, :count] != ignored
    if int(valid.sum()) < _FEWEST_TARGETS:
        return 0
    shifted, same = (float((rows == tokens[:, by : by + count])[valid].double().mean()) for by in (1, 0))
    return int(valid.sum(0).argmax()) + 1 if shifted > 0.9 and same < 0.5 else 0


def _at(outputs: Tensor, targets: Tensor, position: int, samples: int) -> Tensor:
    """The outputs at a position: of shape (samples x positions, classes) or (samples, classes, positions)."""
    if outputs.ndim > targets.ndim > 1:
        return outputs[..., position]
    return outputs.reshape(samples, -1, outputs.shape[-1])[:, position]
