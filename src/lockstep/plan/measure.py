"""Real steps of a training on this machine, and how far an estimate is from them. The steps are the engine's own.

Memory is measured in the second step: the first makes the optimizer's state, and what strategies make when they begin.
torch's profiler tells each allocation and release of its allocators, on the CPU as on a GPU. States are the bytes of
their tensors.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep import build, devices, shortages
from lockstep.data.loader import MicroBatch
from lockstep.distributed.sharded_tensor import local
from lockstep.distributed.world import World
from lockstep.engine.flops import FlopCount
from lockstep.engine.step import TrainState, train_step
from lockstep.plan.measured import Measured
from lockstep.plan.trace import tensors_of
from lockstep.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.config import RunConfig

_STEPS = 2
"""Steps whose memory is measured."""
_MORE = 6
"""Steps after them at most, where torch's profiler missed that memory was freed."""
_MISSED = 0.01  # of the peak: bytes that it may miss
_TIMED = 3
"""Steps after them whose time is measured: a profiler slows steps down."""
_SETTLED_S = 0.05
_BEGIN, _FORWARD, _UPDATE, _END = (f"lockstep: {name}" for name in ("begin", "forward", "update", "end"))


def measure(config: RunConfig) -> Measured | None:
    """Train a few steps on the ranks of this process's world, in memory: nothing is saved and nothing is logged.

    Returns:
        on rank 0 the figures of the rank with the largest peak; None on other ranks.

    Raises:
        LockstepError: the config, the data or the model cannot be used.
    """
    with shortages.temporary_folder("lockstep-measure-") as folder:
        trainer = Trainer(_short(config), run_dir=folder / "run", quiet=True)
        with trainer._join() as world:
            trainer.config = trainer.config.model_copy(update={"batch": trainer.config.batch.resolve(world.size)})
            task = trainer.task()
            prepared = trainer._prepare(task, world)
            here = _measure(trainer.config, prepared, world)
            everywhere = world.gather(here)
            if everywhere is None:
                return None
            highest: Measured = max(everywhere, key=lambda measured: measured.peak_bytes)
            return highest


def _short(config: RunConfig) -> RunConfig:
    """The config without evaluations, and with few steps. The schedule of the learning rate does not matter here."""
    train = config.train.model_copy(
        update={
            "steps": _STEPS + _MORE + _TIMED,
            "epochs": None,
            "min_steps": None,
            "eval_every_epochs": None,
            "eval_every_steps": 0,
            "stop_when": None,
            "max_time": None,
        }
    )
    log = config.log.model_copy(update={"flops": False, "pictures": 0, "writers": [], "model_summary": False})
    device = devices.rather_than_mps(config.device)  # a plan is for CUDA; the CPU is measured as its stand-in
    return config.model_copy(update={"train": train, "log": log, "device": device})


def _measure(config: RunConfig, prepared: build.PreparedRun, world: World) -> Measured:
    state, device = prepared.state, devices.of(world.device)
    prepared.state.forward.train()
    memory = _StepMemory(state)
    batches = iter(prepared.batches)
    for _ in range(_STEPS):
        memory.run(next(batches), prepared.plan.samples(state.step))
    for _ in range(_MORE):
        if world.all_max(int(memory.has_missed)) == 0:
            break
        memory.run(next(batches), prepared.plan.samples(state.step))
    seconds = []
    for _ in range(_TIMED):
        micro_batches = next(batches)
        device.synchronize()
        begun = time.perf_counter()
        train_step(state, micro_batches, prepared.plan.samples(state.step))
        device.synchronize()
        seconds.append(time.perf_counter() - begun)
    first = memory.micro_batches  # whose samples may be shorter than others
    flops = FlopCount(state.strategy, state.precision, compiled=config.compute.compile is not None)
    flops.add(first[:1])
    flops.count(first[0])
    counted = flops.take()
    return Measured(
        world=world.size,
        device=device.name(),
        on_gpu=device.has_own_memory,
        strategy=config.parallel.strategy if world.size > 1 else "single",
        precision=config.precision,
        micro_batch=max(len(each.indices) for each in first),
        accumulate=len(first),
        recompute=config.compute.activation_checkpointing,
        **memory.found,
        flops_per_sample=None if counted is None else counted / max(1, len(first[0].indices)),
        step_seconds=statistics.median(seconds),
    )


class _StepMemory:
    """Measures the memory of steps, and keeps in `found` the figures of the last step of which the profiler missed
    least.

    The profiler misses memory that a thread of the ranks' communication frees, as it does where it is the last to hold
    the input of a collective. Such a step ends with more bytes than it began with.
    """

    def __init__(self, state: TrainState) -> None:
        self.state, self.device = state, devices.of(state.world.device)
        self.found: dict[str, int] = {}
        self.missed = 0
        """Bytes whose release the profiler missed in the step whose figures are in `found`."""
        self.micro_batches: list[MicroBatch] = []
        """Those of the step whose figures are in `found`."""
        self.held: dict[str, int] = {}
        """Bytes of the states by name, counted in an update. Empty: there was no update."""

    @property
    def has_missed(self) -> bool:
        """Whether another step may be measured better."""
        return bool(self.found) and self.missed > _MISSED * self.found["peak_bytes"]

    def run(self, micro_batches: list[MicroBatch], samples: int) -> None:
        """Run a step, and measure it."""
        state, own = self.state, self.device.has_own_memory
        hooks = [
            # In front of the hooks of FSDP, which gather parameters for the backward pass.
            state.forward.register_forward_hook(lambda *args: _mark_backward(args[-1]), prepend=True),
            state.optimizer.register_step_post_hook(lambda *_: self._count()),
        ]
        self.held = {}
        self.device.reset_peak()
        self._settle()
        with _profiled() as profile:
            _mark(_BEGIN)
            train_step(state, micro_batches, samples)
            self._settle()
            _mark(_END)
        peak = self.device.peak()
        for hook in hooks:
            hook.remove()
        if not self.held:
            self.micro_batches = self.micro_batches or micro_batches
            return  # the update was skipped
        batch = _bytes(_tensors([each.collated for each in micro_batches[:2]]))
        live = _levels(_events(profile.kineto_results.events(), "CUDA" if own else "CPU"))
        # The allocator's level is known where the states were counted, so it is known everywhere.
        missed = 0 if own else abs(live.at[_END] - live.at[_BEGIN])
        if self.has_missed and missed > self.missed:
            return
        self.missed, self.micro_batches = missed, micro_batches
        at_update = sum(self.held.values()) + batch + self._buckets()
        self.found = self.held | {
            "batch_bytes": batch,
            "activations_bytes": live.at[_FORWARD] - live.at[_BEGIN],
            "peak_bytes": peak if own else at_update + live.highest - live.at[_UPDATE],
        }

    def _settle(self) -> None:
        """Wait until no thread of the ranks' communication frees memory: a profiler that began or ended meanwhile has
        crashed a rank once."""
        if self.state.world.size > 1:
            self.state.world.all_sum([0.0])
            time.sleep(_SETTLED_S)

    def _buckets(self) -> int:
        """Bytes of DDP's buckets, where they are not the gradients themselves."""
        is_view = getattr(self.state.forward, "gradient_as_bucket_view", True)  # only DDP's wrapper has it
        return 0 if is_view else self.held["gradients_bytes"]

    def _count(self) -> None:
        """Count the states, after the update and before the gradients are freed."""
        _mark(_UPDATE)
        state, seen = self.state, set[int]()
        parameters = list(state.forward.parameters())
        averages = list(state.averages.tensors.values()) if state.averages else []
        self.held["parameters_bytes"] = self._bytes([*parameters, *state.forward.buffers()], seen)
        self.held["gradients_bytes"] = self._bytes([parameter.grad for parameter in parameters], seen)
        self.held["optimizer_bytes"] = self._bytes(list(state.optimizer.state.values()), seen)
        self.held["averages_bytes"] = self._bytes(averages, seen)

    def _bytes(self, value: Any, seen: set[int]) -> int:
        here = self.device.device.type
        return _bytes((tensor for tensor in _tensors(value) if tensor.device.type == here), seen)


@dataclass(frozen=True)
class _Levels:
    """Allocated bytes during a step, less those at its beginning."""

    at: dict[str, int]
    """At the first of each mark."""
    highest: int


def _levels(events: Iterable[tuple[str, int]]) -> _Levels:
    now, highest, at = 0, 0, dict[str, int]()
    for name, size in events:
        now += size
        if name:
            at.setdefault(name, now)
        if name == _END:
            break
        if _BEGIN in at:
            highest = max(highest, now)
    return _Levels(at, highest)


@contextlib.contextmanager
def _profiled() -> Iterator[Any]:
    """A profile of the memory inside. Kineto writes lines of its own to stderr where it starts and stops."""
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)
    with _without_stderr():
        profile.__enter__()
    try:
        yield profile
    finally:
        with _without_stderr():
            profile.__exit__(None, None, None)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _mark(name: str) -> None:
    """A mark among the events of the profiler."""
    with torch.autograd.profiler.record_function(name):
        pass


def _mark_backward(losses: Any) -> None:
    """Mark the begin of the backward pass. By then autocast has freed the weights that nothing needs any more."""
    for loss in tensors_of(losses):
        if loss.requires_grad:
            loss.register_hook(lambda _: _mark(_FORWARD))  # type: ignore[no-untyped-call]


def _events(events: Iterable[Any], kind: str) -> Iterator[tuple[str, int]]:
    """Marks (name, 0) and changes of the allocated bytes ("", bytes) of a kind of device, in the order of time."""
    found = []
    for event in events:
        name = event.name()
        if name == "[memory]" and str(event.device_type()).endswith(kind):
            found.append((event.start_ns(), "", event.nbytes()))
        elif name.startswith("lockstep: "):
            found.append((event.start_ns(), name, 0))
    for _, name, size in sorted(found, key=lambda one: one[0]):
        yield name, size


def _bytes(tensors: Iterable[Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the storages of tensors. Each storage counts once.

    Args:
        seen: addresses of storages that count no more.
    """
    seen, total = set() if seen is None else seen, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            total += storage.nbytes()
            seen.add(storage.data_ptr())
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors on this rank in `value`, which may be nested."""
    return (local(tensor.detach()) for tensor in tensors_of(value))
