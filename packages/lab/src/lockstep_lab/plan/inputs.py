"""The inputs of `estimate`: a training, the machines, and how it would run on them."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lockstep import sizes
from lockstep.core.errors import UsageError
from lockstep.parts import peaks

StrategyName = Literal["single", "ddp", "fsdp", "hybrid"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
_LEAST_MEMORY = 10**5  # bytes; a smaller number lacks its unit


# ---- what is known about a training before it runs


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
    """Index of the block that holds it. Large embeddings and last layers count as blocks. None: it is in the
    root."""
    state_element_bytes: float = 0.0
    """Bytes of optimizer state per element: of tensors with the shape of the parameter."""
    state_other_bytes: int = 0
    """Bytes of optimizer state of other shapes, such as a counter of steps."""
    saved: bool = True
    """Whether checkpoints and averages include it. A model may leave out what is frozen."""
    cut_over: int = 1
    """Ranks of a tensor group that hold different shards of it. `shape` is that of a shard."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def elements_per_rank(self, shards: int) -> int:
        """Elements of the largest shard: rows are divided as `fully_shard` divides them."""
        if shards == 1 or not self.shape:
            return self.elements
        return -(-self.shape[0] // shards) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Segment:
    """A moment of a forward or backward pass: inside one block, or outside blocks."""

    phase: Literal["forward", "backward"]
    block: int | None = None
    """Index of the block. None: outside the blocks."""
    before: int | None = None
    """Index of the block that ran before in this phase."""
    activations: Affine = Affine()
    """Tensors that are kept for the backward pass, and temporary tensors."""
    casts: Affine = Affine()
    """Copies of parameters in the number format of autocast."""
    gradients: Affine = Affine()
    """Gradients of parameters, in their number format, if they are kept from their computation on."""
    gradients_of_block: Affine = Affine()
    """Those of this block and of the root: what is alive if the gradients of other blocks have been freed."""


@dataclass(frozen=True)
class PassFacts:
    """The forward and backward pass of one micro-batch."""

    segments: tuple[Segment, ...]
    batch: Affine
    """The batch itself, on the device."""
    kept: Affine = Affine()
    """Activations and casts that live at the end of the forward pass: what the backward pass needs."""
    kept_casts: Affine = Affine()
    """Of `kept`, the copies of parameters in a different number format."""
    exchanged: dict[str, tuple[int, Affine]] = field(default_factory=dict)
    """By name: collectives of the tensor group, and the bytes of the whole tensors that they return."""


Passes = dict[tuple[PrecisionName, bool, PrecisionName | None], PassFacts]
"""By precision, by recomputation of activations, and by the number format in which FSDP gathers parameters (None: as
they are stored). Those of bf16 also apply to fp16, which has the same bytes."""


@dataclass(frozen=True)
class OptimizerFacts:
    """The update."""

    name: str
    temporary_element_bytes: float
    """Temporary bytes of an update, per element of all parameters together."""
    temporary_largest_bytes: float
    """Temporary bytes of an update, per element of the largest parameter."""
    needs_whole_matrices: bool = False
    """Whether it cannot train shards."""


class Decoding(NamedTuple):
    """Decoding the images of a data set."""

    seconds: float
    """CPU time of an image."""
    bytes: float
    """Size of the pixels of an image."""


class Reading(NamedTuple):
    """Loading samples: reading, decoding, augmenting and collating."""

    seconds: float
    """CPU time of a sample."""
    decoding: Decoding | None
    """None: the data are not images, or `data.cache` is set."""


@dataclass(frozen=True)
class ModelFacts:
    """All that `estimate` needs to know about a task and its config."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    """Names of the repeated blocks, in the model's order."""
    buffers_bytes: int
    optimizer: OptimizerFacts
    passes: Passes
    """Empty: the model could not be traced."""
    flops_per_sample: float | None
    """Forward and backward pass, without recomputation. None: unknown."""
    forward_flops_per_sample: float | None
    recomputed_flops_per_sample: float | None
    """What recomputation adds. None: unknown, or there is none."""
    samples: int | None
    """Samples of an epoch. None: the data are not on this machine."""
    global_batch: int
    """Samples of an update that the config asks for."""
    epochs: float | None = None
    """Length of the training. None: the config gives steps."""
    min_steps: int = 0
    """The training has at least this many steps."""
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
    """Limits of the model and of the facts, for people."""
    ends: tuple[int, int] = (0, 0)
    """Number of large embeddings, which count as blocks before the others, and of large last layers, after them."""
    reading: Reading | None = None
    """How long a sample takes to load on this machine. None: the data are not here."""

    @property
    def stay_from(self) -> int:
        """Index of the first block that stays gathered until the backward pass: of the last layers."""
        return self.ends[0] + len(self.blocks)

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(parameter.elements * parameter.cut_over for parameter in self.parameters)


# ---- where and how it would run


@dataclass(frozen=True)
class Machines:
    """The machines of a training. Bandwidths are those of one GPU in one direction."""

    gpus: int
    """GPUs of the whole training; each has one rank."""
    gpus_per_node: int
    memory_bytes: int | None = None
    """Memory of one GPU. None: unknown, and nothing is compared with it."""
    peak_flops: dict[str, float] | None = None
    """Peak floating-point operations of one GPU per second, by precision. None: unknown."""
    link_bytes_per_second: float | None = None
    """Between GPUs of a node. None: unknown."""
    network_bytes_per_second: float | None = None
    """Between GPUs of different nodes. None: unknown."""
    utilisation: float = 0.4
    """Fraction of `peak_flops` that a training reaches (model FLOPs utilisation)."""
    gpu_name: str | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            where, remedy = "--gpus, plan.gpus_per_node", "give how many GPUs there are"
            raise UsageError("must be at least 1", where=where, remedy=remedy)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            what, remedy = (
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node} GPUs",
                "give a number that divides --gpus",
            )
            raise UsageError(what, where="plan.gpus_per_node", remedy=remedy)
        if not 0 < self.utilisation <= 1:
            what, remedy = f"{self.utilisation} is not a fraction between 0 and 1", "give a number such as 0.4"
            raise UsageError(what, where="plan.utilisation", remedy=remedy)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return max(1, self.gpus // self.gpus_per_node)

    def bandwidth(self, ranks: int, on_node: int = 1) -> float | None:
        """Bytes per second that a GPU sends in a collective over `ranks` ranks. None: it is unknown.

        Between nodes, NCCL makes a ring for each network adapter, and each ring leaves a node once. So `1 / on_node` of
        the bytes that a GPU sends cross the network, and the rest go to a GPU of the same node.

        Args:
            on_node: ranks of the collective that share a node, if the collective spans several nodes.
        """
        link, network = self.link_bytes_per_second, self.network_bytes_per_second
        if ranks <= self.gpus_per_node:
            return link
        if network is None or on_node == 1 or link is None:
            return None if network is None else network * on_node
        return min(link, network * on_node)


@dataclass(frozen=True)
class Setting:
    """A way to run a training in a world."""

    world: Machines
    strategy: StrategyName
    """`hybrid` is fsdp with shards spread over the GPUs of a node, and replicated on each node."""
    precision: PrecisionName
    micro_batch: int
    """Samples of a forward pass on one GPU."""
    accumulate: int = 1
    """Forward passes of a GPU before an update."""
    offload: bool = False
    """fsdp, hybrid: parameters, gradients and optimizer state are in host memory."""
    recompute: bool = False
    """The backward pass computes the activations of blocks again."""
    shard_ranks: int | None = None
    """hybrid: ranks that share one copy. None: the GPUs of a node. fsdp shares one copy among all ranks."""
    param_dtype: PrecisionName | None = None
    """fsdp: number format in which parameters are gathered. None: the format in which they are stored."""
    reduce_dtype: PrecisionName | None = None
    """fsdp: number format in which gradients are reduced. None: fp32 with `param_dtype`, else the stored format."""
    reshard_after_forward: bool = True
    reduce_each_micro_batch: bool = False
    """fsdp: gradients are reduced after each micro-batch, and added up in shards."""
    gradient_as_bucket_view: bool = True
    global_batch: int | None = None
    """Samples of an update over all GPUs. None: every micro-batch is full."""
    tensor: int = 1
    """Ranks of a tensor group, which together hold the layers of one model. With more than one, `ddp` replicates groups
    and `fsdp` shards what each rank of a group holds."""
    virtual_ranks: int | None = None
    """Parts of a global batch. Each GPU computes one or more. None: one part for each GPU or tensor group."""

    def __post_init__(self) -> None:
        is_hybrid = self.strategy == "hybrid" or self.tensor > 1 or self.offload
        if self.virtual_ranks and (is_hybrid or self.world.gpus > self.virtual_ranks):
            what = f"{self.world.gpus} GPUs cannot share {self.virtual_ranks} virtual ranks"
            what = "virtual ranks do not work with hybrid shards, parallel.tensor or offload" if is_hybrid else what
            remedy = f"use ddp or fsdp on at most {self.virtual_ranks} GPUs"
            raise UsageError(what, where=f"parallel.virtual_ranks={self.virtual_ranks}", remedy=remedy)
        if self.tensor > 1 and (self.offload or self.precision == "fp16"):
            what = "tensor parallelism supports neither fp16 nor offload"
            raise UsageError(what, where=f"parallel.tensor={self.tensor}", remedy="use bf16 or fp32, without offload")
        if self.strategy == "single" and self.world.gpus > 1:
            what, remedy = f"{self.world.gpus} GPUs would train {self.world.gpus} models", "use ddp or fsdp, or one GPU"
            raise UsageError(what, where="strategy single", remedy=remedy)
        if self.strategy in ("fsdp", "hybrid") and self.data_ranks == 1:
            what, remedy = ("one GPU", "use single") if self.tensor == 1 else ("one tensor group", "use ddp")
            raise UsageError(f"{what} has nothing to shard", where=f"strategy {self.strategy}", remedy=remedy)
        if self.strategy == "hybrid" and self.data_ranks <= self.shards:
            what = "there is only one group of ranks, such as one node, but hybrid replicates shards over several"
            raise UsageError(what, where="strategy hybrid", remedy="use fsdp, or give plan.gpus_per_node")
        if self.data_ranks % self.shards:
            what = f"{self.data_ranks} GPUs cannot be divided into groups of {self.shards}"
            raise UsageError(what, where="shard_ranks", remedy="use a number that divides the number of GPUs")
        if self.offload and not self.is_sharded:
            remedy = "use fsdp or hybrid"
            raise UsageError("only sharded training can offload", where=f"strategy {self.strategy}", remedy=remedy)
        if self.micro_batch < 1 or self.accumulate < 1:
            raise UsageError("must be at least 1", where="micro-batch, accumulation", remedy="give a number from 1")

    @property
    def is_sharded(self) -> bool:
        """True if FSDP holds the parameters. On a mesh it does so with ddp, too, with one shard."""
        return self.strategy in ("fsdp", "hybrid") or self.tensor > 1

    @property
    def data_ranks(self) -> int:
        """Groups of GPUs with different samples: all GPUs, or tensor groups."""
        return self.world.gpus // self.tensor

    @property
    def parts(self) -> int:
        """Parts into which a global batch is split."""
        return self.virtual_ranks or self.data_ranks

    @property
    def shards(self) -> int:
        """Ranks that together hold one copy of the parameters; on a mesh, of one position's shard in a tensor group."""
        if self.strategy in ("single", "ddp"):
            return 1
        if self.strategy == "fsdp":
            return self.data_ranks
        return self.shard_ranks or self.world.gpus_per_node // self.tensor

    @property
    def replicas(self) -> int:
        """Groups of ranks that each hold one copy."""
        return self.data_ranks // self.shards

    @property
    def effective_batch(self) -> int:
        """Samples of an update over all GPUs."""
        return self.global_batch or self.micro_batch * self.accumulate * self.data_ranks

    @property
    def name(self) -> str:
        """Such as `fsdp + offload + recompute, bf16`."""
        words = ((f"tensor {self.tensor}", self.tensor > 1), ("offload", self.offload), ("recompute", self.recompute))
        extras = [word for word, on in words if on]
        return " + ".join([self.strategy, *extras]) + f", {self.precision}"


# ---- from the words of the command line


def size(text: str, where: str) -> int:
    """Bytes of `80GB`, `79.6GiB` or `80000000000`.

    Raises:
        UsageError: it is not a size, or is smaller than any GPU's memory.
    """
    found = sizes.bytes_of(text, where)
    if found < _LEAST_MEMORY:
        remedy = "write a number with GB or GiB, such as 80GB"
        raise UsageError(f"{text!r} means {found} bytes, but every GPU has more", where=where, remedy=remedy)
    return found


def bandwidth(text: str, where: str) -> float:
    """Bytes per second of `50GB/s`, `400Gbit/s` or `400Gb/s`: a lower-case b means bits.

    Raises:
        UsageError: it is not a bandwidth.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KkMGT]?i?)(B|b|bit|bits)(/s|ps)?\s*", text)
    if match is None or not float(match[1]):
        remedy = "write bytes or bits per second, such as 50GB/s or 400Gbit/s"
        raise UsageError(f"{text!r} is not a bandwidth", where=where, remedy=remedy)
    return float(match[1]) * sizes.UNITS[match[2].upper()] / (1 if match[3] == "B" else 8)


def gpu(name: str) -> peaks.Gpu:
    """The data sheet of a GPU.

    Raises:
        UsageError: the GPU is unknown; names the nearest.
    """
    found = peaks.find(name)
    if found is not None:
        return found
    known = {each.name.lower(): each.name for each in peaks.GPUS}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    remedy = f"the nearest is {known[near[0]]!r}; known are: " if near else "known are: "
    remedy += ", ".join(known.values()) + ". Or give --gpu-memory"
    raise UsageError(f"the GPU {name!r} is unknown", where="--gpu", remedy=remedy)


def world(
    gpus: int,
    *,
    gpus_per_node: int | None = None,
    gpu_memory: str | None = None,
    gpu_name: str | None = None,
    link_bandwidth: str | None = None,
    network_bandwidth: str | None = None,
    utilisation: float = 0.4,
    fp32_as_tf32: bool = False,
) -> Machines:
    """The world that the command line describes.

    Args:
        gpus_per_node: None: 8, or all if there are fewer.
        link_bandwidth: between GPUs of a node, one GPU in one direction. None: half of the data sheet's, which counts
        both directions. It also applies between nodes, if `network_bandwidth` is not given.
        network_bandwidth: between nodes, for one GPU in one direction.
        fp32_as_tf32: whether fp32 matrices are multiplied in TF32.

    Raises:
        UsageError: neither a memory nor a GPU is given, or a value cannot be parsed.
    """
    if gpu_memory is None and gpu_name is None:
        remedy = "add --gpu-memory 80GB, or --gpu H100"
        raise UsageError("the memory of a GPU is not given", where="lockstep plan", remedy=remedy)
    sheet = gpu(gpu_name) if gpu_name is not None else None
    memory = size(gpu_memory, "--gpu-memory") if gpu_memory is not None else None
    link = bandwidth(link_bandwidth, "plan.link_bandwidth") if link_bandwidth is not None else None
    network = bandwidth(network_bandwidth, "plan.network_bandwidth") if network_bandwidth is not None else link
    flops = None
    if sheet is not None:
        memory = memory or int(sheet.memory_gb * 1e9)
        link = link or sheet.link_gb_per_s / 2 * 1e9
        fp32 = (sheet.tf32 if fp32_as_tf32 else None) or sheet.fp32
        by_precision = {"fp32": fp32, "bf16": sheet.bf16, "fp16": sheet.fp16}
        flops = {name: peak * 1e12 for name, peak in by_precision.items() if peak is not None}
    return Machines(
        gpus=gpus,
        gpus_per_node=gpus_per_node or min(8, gpus),
        memory_bytes=memory,
        peak_flops=flops,
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        utilisation=utilisation,
        gpu_name=sheet.name if sheet is not None else None,
    )
