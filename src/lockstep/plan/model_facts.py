"""What is known of a training before it runs: its parameters, and the bytes and operations of its passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lockstep.plan.setting import PrecisionName


@dataclass(frozen=True)
class Affine:
    """A number of bytes that grows with the micro-batch: constant + sample * samples."""

    constant_bytes: float = 0.0
    sample_bytes: float = 0.0

    def at(self, samples: int) -> int:
        """Bytes for a micro-batch of `samples`."""
        return max(0, round(self.constant_bytes + self.sample_bytes * samples))


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter, and what its optimizer keeps for it."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool
    block: int | None
    """Index of the block that holds it. None: it is outside of the blocks, in the root."""
    state_element_bytes: float = 0.0
    """Bytes of optimizer state for each element: of tensors with the shape of the parameter."""
    state_other_bytes: int = 0
    """Bytes of optimizer state of other shapes, such as a counter of steps."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def elements_per_rank(self, shards: int) -> int:
        """Elements of the largest shard: rows are divided, as `fully_shard` divides them."""
        if shards == 1 or not self.shape:
            return self.elements
        return -(-self.shape[0] // shards) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Segment:
    """A moment of a forward or backward pass: inside of one block, or outside of blocks."""

    phase: Literal["forward", "backward"]
    block: int | None = None
    """Index of the block. None: outside of the blocks."""
    before: int | None = None
    """Index of the block that ran before in this phase."""
    activations: Affine = Affine()
    """Tensors that are kept for the backward pass, and temporary tensors."""
    casts: Affine = Affine()
    """Copies of parameters in the number format of autocast."""
    gradients: Affine = Affine()
    """Gradients of parameters, in their number format, where they are kept from their computation on."""
    gradients_of_block: Affine = Affine()
    """Those of this block and of the root: what lives where the gradients of other blocks have been given away."""


@dataclass(frozen=True)
class PassFacts:
    """The forward and backward pass of one micro-batch."""

    segments: tuple[Segment, ...]
    batch: Affine
    """The batch itself, on the device."""
    kept: Affine = Affine()
    """Activations and casts that live at the end of the forward pass: what the backward pass needs."""
    kept_casts: Affine = Affine()
    """Of `kept`, the copies of parameters in another number format."""


Passes = dict[tuple[PrecisionName, bool, PrecisionName | None], PassFacts]
"""By precision, by the recomputation of activations, and by the number format in which FSDP gathers parameters (None:
as they are stored). Those of bf16 stand for fp16, too, which has the same bytes."""


@dataclass(frozen=True)
class OptimizerFacts:
    """The update."""

    name: str
    temporary_element_bytes: float
    """Temporary bytes of an update, for each element of all parameters together."""
    temporary_largest_bytes: float
    """Temporary bytes of an update, for each element of the largest parameter."""
    needs_whole_matrices: bool = False
    """Cannot train shards."""


@dataclass(frozen=True)
class ModelFacts:
    """All that `estimate` needs to know of a task and its config."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    """Names of the repeated blocks, in the model's order."""
    buffers_bytes: int
    optimizer: OptimizerFacts
    passes: Passes
    """Empty: the model could not be traced."""
    flops_per_sample: float | None
    """Forward and backward pass, without recomputation. None: not known."""
    forward_flops_per_sample: float | None
    block_flops_per_sample: float | None
    """Forward pass of the blocks: what recomputation adds."""
    samples: int | None
    """Samples of an epoch. None: the data are not here."""
    global_batch: int
    """Samples of an update that the config asks for."""
    epochs: float | None = None
    """Length of the training. None: the config gives steps."""
    min_steps: int = 0
    """The training is at least so many steps long."""
    steps: int | None = None
    learning_rate: float = 1e-3
    """The config's learning rate, for `reference_batch`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: int = 32
    drop_last: bool = False
    """Whether the last, partial batch of an epoch is left out."""
    averages: bool = False
    """Whether the training keeps moving averages of the weights."""
    optimizer_of_fp16: OptimizerFacts | None = None
    """The update in fp16, which does not use torch's fused kernels. None: as `optimizer`."""
    data: str = ""
    """Where the traced batch came from, for people."""
    notes: list[str] = field(default_factory=list)
    """What is not modelled, or not known."""

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(parameter.elements for parameter in self.parameters)
