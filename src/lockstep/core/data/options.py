"""The config's sections `data` and `batch`. They import no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section
from lockstep.core.errors import UsageError

_GLOBAL_BATCH = 32


def _from_epoch_0(by_epoch: dict[int, int]) -> dict[int, int]:
    if 0 not in by_epoch or min(by_epoch) < 0:
        raise ValueError("gives no value for epoch 0; write {0: 256, 20: 128}, with epochs that are counted from 0")
    return dict(sorted(by_epoch.items()))


def _named_sets(sources: dict[str, str]) -> dict[str, str]:
    if not sources:
        raise ValueError("names no evaluation data; write {NAME: SOURCE}, or null")
    for name in sources:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ValueError(f"{name!r} cannot name evaluation data; use letters, digits, '_', '.' and '-'")
    return sources


class DataConfig(Section):
    """The training and evaluation data."""

    train: str | None = None
    """Source of the training data, for the constructor of the task."""
    eval: str | Annotated[dict[str, str], AfterValidator(_named_sets)] | None = None
    """Source of the evaluation data; or several sources by name, such as `{clean: a.csv, noisy: b.csv}`. With names,
    the results are `eval/clean/accuracy` and so on."""
    eval_limit: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Evaluate at most this many samples per set, spread evenly over it: the same samples each time. The results then
    also have `eval/of_samples`, the size of the set. None: all samples."""
    fold: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$")] | None = None
    """`2/5`: evaluate on the second of five folds of the training data, and train on the others. For tasks that make
    folds."""
    workers: Annotated[int, Field(ge=0), DOES_NOT_DETERMINE] = 0
    """Loader processes of each rank. 0: the rank loads its data itself. An evaluation has as many again."""
    prefetch: Annotated[PositiveInt, DOES_NOT_DETERMINE] = 2
    """Micro-batches that each worker prepares ahead. They wait in shared memory (/dev/shm): on a machine, ranks x
    workers x prefetch micro-batches, and as many again during an evaluation."""
    start_method: Annotated[Literal["fork", "spawn", "forkserver"] | None, DOES_NOT_DETERMINE] = None
    """How loader processes start. `fork` copies the rank at once, with the locks that its threads hold. `spawn` starts
    new interpreters, which takes seconds, and sends them the data set by pickle. `forkserver` forks an interpreter
    without threads, and sends the data set too. None: as Python does, which is `fork` on Linux; `spawn` if polars has
    threads."""
    on_error: Literal["raise", "skip"] = "raise"
    """Reaction to a sample that cannot be read: `raise` the error, or `skip` the sample."""
    drop_last: bool = False
    """True if the last, partial batch of an epoch is left out."""
    group_by_length: PositiveInt | None = None
    """Batches of samples of similar length, which need less padding: number of global batches in a window of the epoch,
    whose samples are sorted by length and cut into these batches, which are then shuffled. For data with the attribute
    `lengths`. None: lengths do not choose the samples of a batch."""
    balance: Literal["label"] | None = None
    """`label`: draw samples with replacement, each label equally often on average. For data whose labels are known; see
    lockstep --explain sampling. None: by the weights of the data set, or without weights each sample once."""
    samples_per_epoch: PositiveInt | None = None
    """Samples that an epoch draws, if they are drawn by weights. None: as many as the data set has."""
    cache: Annotated[Literal["decoded"] | None, DOES_NOT_DETERMINE] = None
    """Images: `decoded` keeps their pixels on disk, so that only the first epoch decodes. The samples are the same.
    None: no cache."""
    cache_gb: Annotated[PositiveFloat, DOES_NOT_DETERMINE] = 100.0
    """Largest size of the cache in 10^9 bytes, for the training data and for the evaluation data."""
    cache_size: PositiveInt | None = None
    """Shorter side in pixels to which larger images are reduced before they are kept. The cache becomes smaller, and
    the samples change. None: images are kept as they are."""

    @property
    def eval_sources(self) -> dict[str, str | None]:
        """The sources of evaluation data by name. A single source, or None, has the empty name."""
        return dict(self.eval) if isinstance(self.eval, dict) else {"": self.eval}

    @model_validator(mode="after")
    def _size_of_a_cache(self) -> DataConfig:
        # Otherwise a different value of `cache`, which is free to change, would change the samples.
        if self.cache_size is not None and self.cache is None:
            raise ValueError("cache_size needs cache: decoded")
        return self


class BatchConfig(Section):
    """Samples of an update, over all ranks.

    Instead of `global` and `micro`, `per_rank` and `accumulate` may be given. The global batch is then
    per_rank x accumulate x ranks of the first launch, and stays the same in later launches.
    """

    global_: PositiveInt | None = Field(None, alias="global")
    """Samples of an update. None: 32."""
    micro: Annotated[
        PositiveInt | Annotated[dict[int, PositiveInt], AfterValidator(_from_epoch_0)] | None, DOES_NOT_DETERMINE
    ] = None
    """Largest number of samples of a forward pass. None: as few forward passes as possible.

    `{0: 256, 20: 128}`: 256 samples from epoch 0 on, and 128 samples from epoch 20 on. Epochs are counted from 0.
    Evaluations use the smallest of these numbers.
    """
    per_rank: PositiveInt | None = None
    """Samples of a forward pass on each rank."""
    accumulate: PositiveInt | None = None
    """Forward passes of each rank before an update."""

    @model_validator(mode="after")
    def _consistent(self) -> BatchConfig:
        if self.global_ is not None and (self.per_rank or self.accumulate):
            raise ValueError("give either global (and micro) or per_rank and accumulate, not both")
        if self.accumulate and not self.per_rank:
            raise ValueError("accumulate needs per_rank")
        if self.micro and self.per_rank:
            raise ValueError("per_rank is the micro-batch; leave micro out")
        if self.global_ is not None and (fault := self._too_large(self.global_)):
            raise ValueError(fault)
        return self

    def _too_large(self, size: int) -> str:
        """Why `micro` is too large for a global batch of `size` samples. Empty: it is not."""
        largest = max(self.micro.values()) if isinstance(self.micro, dict) else self.micro
        return f"micro ({largest}) is above global ({size}); use micro <= global" if largest and largest > size else ""

    @property
    def smallest_micro(self) -> int | None:
        """The smallest number that `micro` has for any epoch."""
        return min(self.micro.values()) if isinstance(self.micro, dict) else self.micro

    def resolve(self, world: int) -> BatchConfig:
        """This section with `global` and `micro` as numbers, for a first launch on `world` ranks.

        Raises:
            UsageError: `micro` is above the default of `global`, which the code of a task could have set.
        """
        if self.per_rank:
            return BatchConfig.model_validate(
                {"global": self.per_rank * (self.accumulate or 1) * world, "micro": self.per_rank}
            )
        size = self.global_ or _GLOBAL_BATCH
        if fault := self._too_large(size):
            raise UsageError(fault, where="batch.micro", remedy=f"give batch.global: without it, it is {size}")
        return self.model_copy(update={"global_": size})
