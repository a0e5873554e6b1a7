"""Run `compute_metrics` of transformers on one rank, over all evaluation samples, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.task import Metrics

if TYPE_CHECKING:
    import numpy.typing as npt

_PADDING = -100  # what Trainer pads rows of different lengths with


def gathered(compute_metrics: Callable[[Any], Mapping[str, float]], labels: Sequence[str]) -> Metrics:
    """A metric that keeps predictions and labels, and calls `compute_metrics` with all of them in order.

    Args:
        labels: the keys of a batch that are labels.
    """
    from torchmetrics import Metric

    class Computed(Metric):
        """Predictions and labels of all batches, as lists of tensors."""

        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            for state in ("predictions", "labels", "batches"):
                self.add_state(state, [], dist_reduce_fx=None)

        def update(self, predictions: Any, truth: Any) -> None:
            kept: Any = self
            kept.predictions += _tensors(predictions)
            kept.labels += _tensors(truth)
            kept.batches.append(torch.ones(()))

        def compute(self) -> dict[str, float]:
            from transformers import EvalPrediction

            kept: Any = self
            predictions, truth = (_joined(part, len(kept.batches)) for part in (kept.predictions, kept.labels))
            found = compute_metrics(EvalPrediction(predictions=predictions, label_ids=truth))
            return {name.removeprefix("eval_"): float(value) for name, value in found.items()}

    def update(metrics: Any, output: Any, batch: Any) -> None:
        truth = tuple(batch.batch[name] for name in labels if name in batch.batch)
        metrics["computed"].update(output, truth)

    return Metrics({"computed": Computed()}, update)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, on the CPU."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        return [plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain]
    return [one for item in value for one in _tensors(item)] if isinstance(value, tuple | list) else []


def _joined(parts: Sequence[Tensor], batches: int) -> Any:
    """The tensors of all batches, the same number from each batch, as an array or a tuple of arrays. Rows of different
    lengths are padded with -100."""
    width = len(parts) // max(1, batches)
    columns = [_column(parts[place::width]) for place in range(width)]
    return columns[0] if width == 1 else tuple(columns)


def _column(parts: Sequence[Tensor]) -> npt.NDArray[Any]:
    if parts[0].ndim > 1:
        length = max(part.shape[1] for part in parts)
        parts = [_filled(part, length) for part in parts]
    whole: npt.NDArray[Any] = torch.cat(list(parts)).numpy()
    return whole


def _filled(part: Tensor, length: int) -> Tensor:
    if part.shape[1] == length:
        return part
    whole = part.new_full((part.shape[0], length, *part.shape[2:]), _PADDING)
    whole[:, : part.shape[1]] = part
    return whole
