"""The model for risks from a CT volume: a backbone processes each slice, and an aggregator combines them into one
prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.aggregators import Pooled
from lockstep_recipes.tasks.ct.backbone import SliceBackbone, dtype_of, is_frozen, set_trainable_modes
from lockstep_recipes.tasks.vision.images.normalise import normalise

Batch = Mapping[str, Any]

FROZEN_CHUNK = 4
"""The number of slices that pass through a frozen backbone together. It is fixed, and the last chunk is padded with
zeros, so that the bits of a feature do not depend on the other slices in the chunk."""


class Risks(NamedTuple):
    """The result of a forward pass."""

    logits: Tensor
    """The logit of each risk: (B, Q)."""
    attention: Tensor
    """The weight of each slice in its volume: (N,). The weights of a volume sum to 1."""


class VolumeRiskModel(nn.Module):
    """One prediction per question from the slices of a volume.

    A batch is a dict: `slices`: uint8 (M, channels, S, S), the slices of all volumes one after another; `counts`: int64
    (B), the number of slices of each volume; `positions`: float32 (N), millimetres along the axis. N is the sum of
    `counts`. The entry `longest`, an int, is the largest of `counts`; without it, the host waits for the device to
    compute it.

    Without cached features, M is N. With cached features (see `features`), a batch also has `features`, float (N,
    width), and `is_kept`, bool (N), which marks the slices with a cached feature. Then `slices` contains only the
    remaining slices, (0, channels, S, S) if all features are cached.

    Frozen submodules of the backbone are in evaluation mode while the rest trains. A completely frozen backbone runs
    without gradients, in chunks of `FROZEN_CHUNK` slices.

    Args:
        backbone: computes feature vectors of slices.
        aggregator: see `aggregators`.
        head: see `heads`.
        mean, std: of each channel, as fractions of 255, for `tasks.vision.images.normalise.normalise`.
        slices_per_chunk: the maximum number of slices that pass through a trainable backbone together. The activations
            of all chunks but the last are recomputed in the backward pass, with the same dropout. None: all slices pass
            at once, and their activations are kept.
    """

    def __init__(
        self,
        backbone: SliceBackbone,
        aggregator: nn.Module,
        head: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        slices_per_chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.aggregator, self.head = backbone, aggregator, head
        self.mean, self.std = list(mean), list(std)
        self.slices_per_chunk = slices_per_chunk
        self.largest_over_ranks: Callable[[int], int] = _same
        """The maximum of a number over all ranks. A strategy whose forward passes are collectives sets this: ranks with
        fewer chunks then run chunks of zeros."""

    def forward(self, batch: Batch, features: Tensor | None = None) -> Risks:
        """The prediction for each volume.

        Args:
            features: of all slices, (N, width), as `slice_features` returns. None: they are computed.
        """
        if features is None:
            features = self.slice_features(batch)
        counts = batch["counts"]
        longest = batch["longest"] if "longest" in batch else int(counts.max())
        return self.of_volumes(features, counts, batch["positions"], longest)

    def of_volumes(self, features: Tensor, counts: Tensor, positions: Tensor, longest: int) -> Risks:
        """The prediction for each volume, from the features (N, width) of its slices. For the other arguments see the
        class."""
        pooled: Pooled = self.aggregator(features, counts, positions, longest)
        return Risks(self.head(pooled.vectors), pooled.attention)

    def features_at_once(self, slices: Tensor) -> Tensor:
        """The feature vectors (N, width) of slices, uint8 (N, channels, S, S), in one pass."""
        return self._wide(self._features(slices))

    def slice_features(self, batch: Batch) -> Tensor:
        """The feature vectors of all slices, cached or computed: (N, width), in the number format of the parameters.

        Raises:
            UsageError: features are cached, but the backbone trains.
        """
        frozen = is_frozen(self.backbone)
        set_trainable_modes(self.backbone, self.training and not frozen)
        kept: Tensor | None = batch.get("features")
        if kept is not None and not frozen and self.training:
            what = "the backbone trains, but the batch contains features that were cached while it was frozen"
            remedy = "cache features only until the epoch in which train.unfreeze starts to unfreeze the backbone"
            raise UsageError(what, where="task.keep_features", remedy=remedy)
        if frozen:
            with torch.no_grad():
                computed = self._fixed_chunks(batch["slices"])
        elif self.slices_per_chunk is None:
            computed = self._wide(self._features(batch["slices"]))
        else:
            computed = self._trained_chunks(batch["slices"], self.slices_per_chunk)
        if kept is None:
            return computed
        return kept.to(computed.dtype).masked_scatter(~batch["is_kept"][:, None], computed)

    def _fixed_chunks(self, slices: Tensor) -> Tensor:
        """Features (M, width) of slices (M, channels, S, S), computed in chunks of `FROZEN_CHUNK` slices."""
        count, size = len(slices), FROZEN_CHUNK
        chunks = self.largest_over_ranks(-(-count // size))
        missing = chunks * size - count
        if missing:
            slices = torch.cat([slices, slices.new_zeros(missing, *slices.shape[1:])])
        parts = [self._wide(self._features(chunk)) for chunk in torch.split(slices, size) if len(chunk)]
        if not parts:
            return torch.empty(0, self.backbone.width, dtype=self._wide_dtype, device=slices.device)
        return torch.cat(parts)[:count]

    def _trained_chunks(self, slices: Tensor, size: int) -> Tensor:
        """Features (M, width) of slices (M, channels, S, S), computed in chunks of at most `size` slices.

        Chunks are nearly equal. The backward pass starts with the last chunk: its activations are kept, and those of
        all other chunks are recomputed. So the memory of one chunk is enough.
        """
        own = -(-len(slices) // size)
        chunks = self.largest_over_ranks(own)
        if not chunks:
            return torch.empty(0, self.backbone.width, dtype=self._wide_dtype, device=slices.device)
        # A rank with fewer chunks runs chunks with a slice of zeros, before its own.
        parts = [slices.new_zeros(1, *slices.shape[1:])] * (chunks - own)
        parts += slices.tensor_split(own) if own else []
        first = self._recomputed if torch.is_grad_enabled() else self._features
        recomputed = [self._wide(first(chunk)) for chunk in parts[:-1]]
        whole = torch.cat([*recomputed, self._wide(self._features(parts[-1]))])
        # Features of zero slices are added with a factor of 0, so that their chunks have a backward pass, too.
        return whole[chunks - own :] + 0 * whole[: chunks - own].sum() if chunks > own else whole

    def _wide(self, features: Tensor) -> Tensor:
        return features.to(self._wide_dtype)

    @property
    def _wide_dtype(self) -> torch.dtype:
        """The number format of features: at least 32 bits."""
        return torch.float64 if dtype_of(self.backbone) == torch.float64 else torch.float32

    def _features(self, slices: Tensor) -> Tensor:
        features: Tensor = self.backbone(normalise(slices, self.mean, self.std, dtype=dtype_of(self.backbone)))
        return features

    def _recomputed(self, slices: Tensor) -> Tensor:
        features: Tensor = checkpoint(self._features, slices, use_reentrant=False)
        return features


def _same(number: int) -> int:
    return number
