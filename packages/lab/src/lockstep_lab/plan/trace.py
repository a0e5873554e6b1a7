"""The bytes and operations of one forward and backward pass, counted while torch runs it on tensors without values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.core.data.tensors import map_tensors
from lockstep.parts.flops import FlopCounterMode
from lockstep.parts.operations import Observer

Phase = Literal["forward", "backward"]


class Snapshot(NamedTuple):
    """The live bytes at one moment."""

    activations: int
    casts: int
    gradients: int
    gradients_of_block: int
    """Of the block that runs, and of the root."""


@dataclass
class TracedSegment:
    """A part of a pass; see `inputs.Segment`."""

    phase: Phase
    block: int | None
    before: int | None
    flops: int = 0
    """Operations of the pass before the segment."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """After each operation that made a storage, in order."""

    @property
    def most(self) -> int:
        """Bytes of activations, casts and gradients at their peak."""
        return max((sum(snapshot[:3]) for snapshot in self.snapshots), default=0)

    @property
    def place(self) -> tuple[str, int | None, int | None]:
        """The position of the segment in the pass."""
        return self.phase, self.block, self.before


@dataclass
class TracedPass:
    """A forward and a backward pass of one micro-batch."""

    samples: int
    segments: list[TracedSegment]
    batch_bytes: int
    kept_bytes: int
    """Activations and casts at the end of the forward pass."""
    kept_casts_bytes: int
    flops: int
    """Forward and backward pass, without recomputation."""
    recomputed_flops: int
    exchanged: list[tuple[str, int]]
    """Collectives of the tensor group, each with the bytes of the tensor that it returns."""

    @property
    def forward_flops(self) -> int:
        """Of the forward pass."""
        return next(segment.flops for segment in self.segments if segment.phase == "backward")


class Untraceable(Exception):
    """A pass could not be traced.

    Args:
        module: name of the module at which it failed; `model` for the whole model, empty outside it.
    """

    def __init__(self, module: str, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}")
        self.module = module

    @property
    def where(self) -> str:
        """The module for people."""
        return {"": "Task.loss", "model": "the model's own forward"}.get(self.module, f"module {self.module}")


@dataclass(slots=True)
class _Storage:
    """A live storage: its bytes, and their purpose."""

    bytes: int
    kind: str


class LiveBytes(Observer):
    """Inside, the bytes of all storages that operations make are counted until they are freed.

    Args:
        parameters: their storages do not count. Their copies in a different number format count as casts.
        others: further tensors that do not count, such as the batch.
        counted: counts the operations of the pass.
    """

    def __init__(
        self, parameters: Sequence[Tensor], others: Sequence[Tensor] = (), counted: FlopCounterMode | None = None
    ) -> None:
        super().__init__()
        self.counted = counted
        self.live: Any = WeakIdKeyDictionary()
        self.bytes = {"activation": 0, "cast": 0, "gradient": 0, "gradient_of_block": 0, "gradient_of_root": 0}
        self.known = {id(storage): storage for storage in (p.untyped_storage() for p in (*parameters, *others))}
        self.parameters = {id(p.untyped_storage()) for p in parameters}
        self.segments: list[TracedSegment] = []
        self.begin("forward", None)

    def begin(self, phase: Phase, block: int | None) -> None:
        """Begin a new segment."""
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.phase, last.block) == (phase, block):
            return
        before = last.block if last is not None and last.block is not None else last.before if last else None
        if last is not None and last.phase != phase:
            before = None
        if block is not None and phase == "backward":  # the gradients of the previous block have been freed
            self.bytes["gradient_of_block"] = 0
        self.segments.append(TracedSegment(phase, block, before, self.counted.total if self.counted else 0))
        self._take_snapshot()

    def mark_gradient(self, gradient: Tensor, of_root: bool) -> None:
        """From now on, the storage of `gradient` counts as that of a complete gradient."""
        entry = self.live.get(gradient.untyped_storage())
        if entry is None or entry.kind.startswith("gradient"):
            return
        self.bytes[entry.kind] -= entry.bytes
        entry.kind = "gradient"
        self.bytes["gradient"] += entry.bytes
        self.bytes["gradient_of_root" if of_root else "gradient_of_block"] += entry.bytes

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        kind = "activation"
        if func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self.parameters:
            kind = "cast"
        if sum(self._add(tensor, kind) for tensor in tensors_of(result)):
            self._take_snapshot()

    def _add(self, tensor: Tensor, kind: str) -> bool:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse tensors and the like have no single storage
            return False
        if storage in self.live or id(storage) in self.known:
            return False
        size = storage.nbytes()
        entry = self.live[storage] = _Storage(size, kind)
        self.bytes[kind] += size
        weakref.finalize(storage, self._free, entry)
        return True

    def _free(self, entry: _Storage) -> None:
        self.bytes[entry.kind] -= entry.bytes

    def _take_snapshot(self) -> None:
        now = self.bytes
        of_block = now["gradient_of_block"] + now["gradient_of_root"]
        self.segments[-1].snapshots.append(Snapshot(now["activation"], now["cast"], now["gradient"], of_block))


@contextlib.contextmanager
def _as_on_gpu() -> Generator[None, None, None]:
    """Inside, dropout runs as on a GPU: it keeps a mask of one byte per element, and attention keeps none.

    The functions themselves are replaced: a mode of torch would not see the passes that the backward pass reruns.
    """
    functions = nn.functional
    dropout, attention = functions.dropout, functions.scaled_dot_product_attention

    def masked(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0 or inplace:
            return dropout(input, p, training, inplace)
        result: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
        return result

    def without_mask(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # torch's MultiheadAttention passes it by position
        **options: Any,
    ) -> Tensor:
        if options.get("enable_gqa") and (attn_mask is not None or value.dtype != torch.bfloat16):
            copies = query.shape[1] // key.shape[1]  # on a GPU, only flash attention in bf16 shares heads
            key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
            options["enable_gqa"] = False
        return attention(query, key, value, attn_mask, 0.0, is_causal, **options)

    setattr(functions, "dropout", masked)  # noqa: B010 - mypy knows no assignment to functions
    setattr(functions, "scaled_dot_product_attention", without_mask)  # noqa: B010
    try:
        yield
    finally:
        setattr(functions, "dropout", dropout)  # noqa: B010
        setattr(functions, "scaled_dot_product_attention", attention)  # noqa: B010


def trace_pass(
    forward: nn.Module,
    batch: Any,
    samples: int,
    *,
    blocks: Sequence[nn.Module],
    autocast: Callable[[], contextlib.AbstractContextManager[object]],
    as_on_gpu: bool,
    exchanged: list[tuple[str, int]],
) -> TracedPass:
    """Run a forward and a backward pass as a training step does, and count.

    Args:
        forward: from a batch to losses by head. Its parameters have no gradients.
        batch: of `samples`; its tensors are fake or real like the parameters.
        blocks: the repeated blocks.
        autocast: the context of the forward pass.
        as_on_gpu: choose operators as a GPU would.
        exchanged: the list to which the model adds the collectives of its tensor group.

    Raises:
        Untraceable: an operation needs values, and tensors have none; or the pass failed.
    """
    parameters = list(forward.parameters())
    place = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    tensors = tensors_of(batch)
    exchanged.clear()
    counted, stack = FlopCounterMode(), _Modules(forward)
    live = LiveBytes(parameters, [*forward.buffers(), *tensors], counted)

    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.mark_gradient(parameter.grad, of_root=id(parameter) not in place)

    with contextlib.ExitStack() as hooks:
        hooks.callback(forward.zero_grad)
        for index, block in enumerate(blocks):
            hooks.enter_context(_watched(block, index, live))
        for parameter in parameters:
            if parameter.requires_grad:
                handle: Any = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
        hooks.enter_context(stack.watched())
        try:
            with contextlib.ExitStack() as modes:
                if as_on_gpu:
                    modes.enter_context(_as_on_gpu())
                modes.enter_context(counted)
                modes.enter_context(live)
                with autocast():
                    losses = forward(batch)
                kept_casts_bytes = live.bytes["cast"]
                kept_bytes = live.bytes["activation"] + kept_casts_bytes
                live.begin("backward", None)
                roots = [loss for loss in losses.values() if loss.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(loss) for loss in roots])
        except Exception as error:
            raise Untraceable(stack.innermost, error) from error
    batch_bytes = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
    kept = batch_bytes, kept_bytes, kept_casts_bytes
    return TracedPass(samples, live.segments, *kept, counted.total, counted.recomputed, exchanged[:])


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in mappings, lists, tuples and dataclasses."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


@contextlib.contextmanager
def _watched(block: nn.Module, index: int, live: LiveBytes) -> Generator[None, None, None]:
    """Inside, `live` begins a segment when the block's forward or backward pass begins or ends."""

    def leave_backward(_: Tensor) -> None:
        if live.segments[-1].phase == "backward" and live.segments[-1].block == index:
            live.begin("backward", None)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if live.segments[-1].phase == "forward":
            live.begin("forward", index)
            for tensor in tensors_of((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(leave_backward)  # type: ignore[no-untyped-call]

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if live.segments[-1].phase == "forward":
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: live.begin("backward", index))  # type: ignore[no-untyped-call]
            live.begin("forward", None)

    handles = [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Modules:
    """The module of a model that is running."""

    def __init__(self, forward: nn.Module) -> None:
        self.names = {id(module): name.removeprefix("model.") for name, module in forward.named_modules()}
        self.running: list[str] = []

    @property
    def innermost(self) -> str:
        """Name of the module that began last and has not ended: `model` for the whole model, empty outside it."""
        return next((name for name in reversed(self.running) if name), "")

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Inside, modules are recorded while they run."""

        def before(module: nn.Module, *_: Any) -> None:
            if id(module) in self.names:
                self.running.append(self.names[id(module)])

        def after(module: nn.Module, *_: Any) -> None:
            if id(module) in self.names and self.running:
                self.running.pop()

        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
