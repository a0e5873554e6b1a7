"""From facts and a setting to bytes, operations and seconds: arithmetic without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.plan.model_facts import ModelFacts
from lockstep.plan.setting import Setting


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, of the rank that has most.

    Each part is given at its largest. The parts are not all at their largest at the same time, so `peak_bytes` may be
    less than their sum; `at_peak` has parts of one moment, whose sum is `peak_bytes`.
    """

    parameters_bytes: int
    """Parameters and buffers, as they are stored."""
    gradients_bytes: int
    optimizer_bytes: int
    averages_bytes: int
    """Moving averages of the weights (EMA)."""
    activations_bytes: int | None
    """Tensors that the backward pass needs, and temporary tensors. None: not known, the model could not be traced."""
    communication_bytes: int
    """Gathered parameters, and buffers of collectives."""
    batch_bytes: int
    peak_bytes: int
    """Without activations, where they are not known."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes by part (the names above without `_bytes`) at the moment of the peak."""
    peak_is_in: str = ""
    """Where the peak is: `forward`, `backward` or `update`."""
    host_bytes: int = 0
    """Bytes in the host's memory of one rank: what is offloaded."""

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients, optimizer state and averages: what does not depend on the batch."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.averages_bytes


@dataclass(frozen=True)
class Communication:
    """What one GPU sends in a step."""

    sent_bytes: dict[str, int]
    """By collective: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`."""
    seconds: float | None
    """Time at the bandwidths of the setting. None: they are not known."""

    @property
    def total_bytes(self) -> int:
        """Over all collectives."""
        return sum(self.sent_bytes.values())


@dataclass(frozen=True)
class Estimate:
    """What a training needs in a setting."""

    setting: Setting
    memory: Memory
    communication: Communication
    flops_per_sample: float | None
    """Forward and backward pass, without recomputation."""
    flops_per_step: float | None
    """Of the whole global batch, over all GPUs, without recomputation."""
    compute_seconds: float | None
    """Passes of a step, at the stated utilisation, with recomputation. None: the GPU's throughput is not known."""
    step_seconds: float | None
    """The longer of computing and communicating, as if they overlapped fully."""
    epoch_seconds: float | None
    training_seconds: float | None
    steps_per_epoch: int | None
    samples_per_epoch: int | None
    effective_batch: int
    learning_rate: float
    """Scaled for the effective batch by the config's rule."""
    checkpoint_bytes: int

    def fits(self, reserve: float = 0.1) -> bool | None:
        """Whether the peak leaves `reserve` of the GPU's memory free. None: memory or activations are not known."""
        limit = self.setting.world.memory_bytes
        if limit is None:
            return None
        if self.memory.peak_bytes > limit * (1 - reserve):
            return False
        return True if self.memory.activations_bytes is not None else None


def estimate(facts: ModelFacts, setting: Setting) -> Estimate:
    """What the training of `facts` needs in `setting`. Pure: the same arguments give the same result.

    Raises:
        UsageError: the strategy cannot train with this optimizer, or there are no blocks to recompute.
    """
    raise NotImplementedError
