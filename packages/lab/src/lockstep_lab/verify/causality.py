"""Does the prediction at a position change with later inputs? Then the model reads its target among its input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lockstep_lab.verify.reference import data

_FEWEST_TARGETS, _FEWEST_STEPS = 8, 3
_ROUNDING = 1e-5
_WORDS = "the output at position {} changes with the input at position {}"


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
                if _differ(before, after):
                    return _WORDS.format(position, position + 1)
        return _sees_future_numbers(loss, model, batch)


def _sees_future_numbers(loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """`sees_future` for sequences of numbers: one tensor of a batch is another one, shifted by a position."""
    floating = [one for one in data.tensors(batch) if one.is_floating_point() and one.ndim > 1 and len(one) > 1]
    for given, target in itertools.permutations(floating, 2):
        steps = given.shape[1]
        if given.shape != target.shape or steps < _FEWEST_STEPS or not torch.equal(given[:, 1:], target[:, :-1]):
            continue
        if torch.equal(given, target) or steps in given.shape[2:]:  # a model may put the positions last
            continue
        position = steps // 2
        changed = given.clone()
        changed[:, position:] = given[:, position:].roll(1, 0)  # of another sample
        before = _outputs(loss, model, batch)
        after = _outputs(loss, model, data.mapped(batch, partial(_replaced, given, changed)))
        for one, other in zip(before, after, strict=False):
            alike = one.shape[:2] == given.shape[:2] and one.shape == other.shape
            if alike and _differ(one[:, position - 1], other[:, position - 1]):
                return _WORDS.format(position, position + 1)
    return ""


def _replaced(given: Tensor, changed: Tensor, one: Tensor) -> Tensor:
    return changed if one is given else one


def _outputs(loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> list[Tensor]:
    """The outputs of the model's first call in a loss."""
    found: list[list[Tensor]] = []
    handle = model.register_forward_hook(lambda *told: found.append(data.tensors(told[2])))
    try:
        loss(model, batch)
    finally:
        handle.remove()
    return found[0] if found else []


def _differ(before: Tensor, after: Tensor) -> bool:
    return float((after - before).abs().max()) > _ROUNDING * float(before.abs().max())


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
