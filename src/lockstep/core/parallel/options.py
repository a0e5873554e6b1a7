"""The config's section `parallel`, which the strategies take as their options. It imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lockstep.core.config.config_section import DETERMINES_TRAINING, Section
from lockstep.core.errors import UsageError


class ParallelConfig(Section):
    """The distribution of the model over the ranks. lockstep --explain parallel explains the choices."""

    strategy: Literal["single", "ddp", "fsdp"] = "ddp"
    """`ddp` keeps a copy of the model on each rank, `fsdp` shards it over ranks, `single` is for one rank."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without progress of any rank after which the run ends with a report."""
    virtual_ranks: Annotated[PositiveInt | None, DETERMINES_TRAINING] = None
    """Split each global batch over this many virtual ranks: the result has the same bits on any number of ranks up to
    it. See lockstep --explain bits. None: split it over the ranks."""
    find_unused_parameters: bool = False
    """DDP: some trainable parameters get no gradient in some batches."""
    static_graph: bool = False
    """DDP: every step uses the same parameters."""
    bucket_mb: PositiveFloat | None = None
    """DDP: size in MiB of the buckets in which gradients are reduced. None: DDP's default."""
    gradient_as_bucket_view: bool = True
    """DDP: gradients are views of the buckets, which saves memory."""
    shard_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """FSDP: patterns of the modules that are sharded separately. None: the model's repeated blocks."""
    shard_ranks: PositiveInt | None = None
    """FSDP: shard over groups of this many neighbouring ranks, and replicate across groups. None: shard over all
    ranks."""
    tensor: PositiveInt = 1
    """The layers of a model are split over this many neighbouring ranks, which get the same samples. See
    lockstep --explain mesh."""
    reshard_after_forward: bool = True
    """FSDP: free the gathered parameters of a block after its forward pass."""
    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    """FSDP: number of blocks that are gathered ahead in the forward pass. 0: FSDP's default."""
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    """FSDP: number of blocks that are gathered ahead in the backward pass. 0: FSDP's default."""
    reduce_each_micro_batch: bool = False
    """FSDP: reduce gradients after each micro-batch, and add them up in shards. False: add up whole gradients, and
    reduce the sum once in a step."""
    cpu_offload: bool = False
    """FSDP: keep parameters, gradients and optimizer state in host memory."""
    param_dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, DETERMINES_TRAINING] = None
    """FSDP: number format in which parameters are gathered. None: the format in which they are stored."""
    reduce_dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, DETERMINES_TRAINING] = None
    """FSDP: number format in which gradients are reduced. None: the format in which they are stored."""

    def without_mesh(self, what: str, remedy: str = "use parallel.tensor=1, with any strategy") -> None:
        """Raises UsageError if `tensor` asks for a mesh: `what` does not support models that are split."""
        if self.tensor > 1:
            what = f"{what} does not support models that are split across ranks"
            raise UsageError(what, where=f"parallel.tensor={self.tensor}", remedy=remedy)
