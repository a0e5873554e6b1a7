"""The floating-point operations per second of a training, as a number and as a fraction of the GPU's peak.

The operations of the forward and backward pass of one micro-batch are counted once. They are then scaled by the number
of elements (pixels, tokens) of each batch. So a step only has to read the sizes of its tensors.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core import batch_norm, devices
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.randomness import restored_generators
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.single import Single
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.parallel.world import World
from lockstep.parts import peaks
from lockstep.parts.operations import Observer


class FlopCount:
    """Counts the floating-point operations of this rank's training.

    The count comes from a forward and a backward pass of zeros that leaves no trace: gradients, model and random states
    stay as they were. So the training is bitwise the same with and without a count. A real pass cannot be counted,
    because torch computes some operations differently while an operation counter is on.

    Matrix products, convolutions and attention count, a multiplication and an addition as two, as in
    `torch.utils.flop_counter`. Activations that the backward pass computes again do not count: this is the definition
    of model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Recurrent layers and kernels
    outside torch have no formula, and do not count.

    Args:
        compiled: whether `torch.compile` was applied to the model. The counted pass runs the code as written.
    """

    def __init__(self, strategy: Strategy, precision: Precision, world: World, *, compiled: bool = False) -> None:
        self.strategy, self.precision, self.world, self.compiled = strategy, precision, world, compiled
        self.elements = 0
        """Elements of this rank's batches since `take`."""
        self.per_element: float | None = None
        """Floating-point operations per element of a batch. None: not counted, or it was not possible."""
        self.counted_for: int | None = None  # trainable parameters at the time of the last count
        self.attention: dict[str, int] = {}
        """How often a counted forward pass called each kernel of attention, by torch's name of the kernel."""

    def add(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add a step that was computed. Fillers add nothing."""
        for micro_batch in micro_batches:
            if not micro_batch.filler:
                self.elements += _elements(micro_batch)

    def count(self, micro_batch: MicroBatch, few: Callable[[MicroBatch], MicroBatch] | None = None) -> None:
        """Count the operations of a micro-batch, unless that was done for the parameters that are trainable now.

        All ranks call it after the same step. If the pass fails, for example for lack of memory on a single rank,
        nothing is counted. With several ranks, a rank without memory fails, because others may wait for it.

        Args:
            few: returns a part of the micro-batch, which is counted instead.
        """
        trainable = sum(parameter.requires_grad for parameter in self.strategy.forward.parameters())
        if trainable == self.counted_for:
            return
        self.counted_for, self.per_element = trainable, None
        strategy, operations = self.strategy, FlopCounterMode()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(restored_generators(self.precision.device))
                micro_batch = micro_batch if few is None else few(micro_batch)
                if micro_batch.filler:
                    stack.enter_context(batch_norm.without_trace(strategy.forward))
                if self.compiled:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(operations)
                alone = Single(self.world)  # without DDP, gradients are not exchanged
                alone.wrap(strategy.unwrapped)
                alone.pass_of_zeros(micro_batch.batch, self.precision)
        except Exception as error:
            # The other ranks may wait for this rank: for its shards, or within SyncBatchNorm.
            if strategy.is_sharded or (self.world.size > 1 and devices.of(self.world.device).is_shortage(error)):
                raise
            # A log figure must not end a training. If the task is at fault, its next step reports it.
            traceback.clear_frames(error.__traceback__)  # they hold activations
            strategy.forward.zero_grad(set_to_none=True)
            return
        finally:
            micro_batch.let_go()
        self.per_element, self.attention = operations.total / _elements(micro_batch), operations.attention

    def take(self) -> float | None:
        """Floating-point operations of this rank since the last call. None: unknown."""
        elements, self.elements = self.elements, 0
        return None if self.per_element is None else self.per_element * elements

    def peak(self, device_name: str) -> float | None:
        """Peak operations per second of a GPU in this precision. None: the GPU is unknown.

        For fp32, this is the peak of TF32, if products or convolutions may use TF32.
        """
        number_format = self.precision.name
        return peaks.flops(device_name, "tf32" if number_format == "fp32" and _allows_tf32() else number_format)


class FlopCounterMode(Observer):
    """Adds up the floating-point operations inside."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        aten = torch.ops.aten
        # torch has no formulas for the attention of the CPU, which takes the same arguments as that of GPUs.
        forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
        on_cpu = {
            aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[forward],
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
        }
        self.formulas: dict[Any, Any] = {**flop_registry, **on_cpu}
        self.total, self.recomputed = 0, 0  # in forward and backward passes; in forward passes that are run again
        self.attention: dict[str, int] = {}

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = func.name().partition("::")[2].partition(".")[0].strip("_").removeprefix("scaled_dot_product_")
        name = "math_attention" if name == "safe_softmax" else name  # of torch's slow attention, in several operations
        if ("attention" in name or "attn" in name) and "backward" not in name and not _is_recomputation():
            self.attention[name] = self.attention.get(name, 0) + 1
        formula = self.formulas.get(func._overloadpacket)
        if formula is not None:
            # An operation of a layer that is sharded over ranks is seen as that of the whole layer; others as they are.
            ranks = next((each.device_mesh.size() for each in args if hasattr(each, "device_mesh")), 1)
            counted = formula(*args, **kwargs, out_val=result) // ranks
            again = counted if _is_recomputation() else 0
            self.recomputed, self.total = self.recomputed + again, self.total + counted - again


def _is_recomputation() -> bool:
    """True if an operation belongs to a forward pass that the backward pass runs again."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1  # private; a test detects changes


def _allows_tf32() -> bool:
    if torch.get_float32_matmul_precision() != "highest":
        return True
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # convolutions and recurrent layers differ
        return True


def _elements(micro_batch: MicroBatch) -> int:
    """Elements of the tensors of a batch; its number of samples, if it contains no tensors. At least 1."""
    return _numel(micro_batch.collated) or len(micro_batch.indices) or 1


def _numel(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    count = 0
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        count += item.numel() if isinstance(item, Tensor) else _numel(item)
    return count
