"""Real steps of a training on this machine, and how far an estimate is from them. The steps are the engine's own.

Memory is measured in the first two steps: the first makes the optimizer's state. torch's profiler tells each allocation
and release of its allocators, on the CPU as on a GPU. States are the bytes of their tensors.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import build, devices
from lockstep.config import RunConfig
from lockstep.data.loader import MicroBatch
from lockstep.distributed.sharded_tensor import local
from lockstep.distributed.world import World
from lockstep.engine.flops import FlopCount
from lockstep.engine.step import TrainState, train_step
from lockstep.plan.measured import Measured
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer

_STEPS = 2
"""Steps whose memory is measured."""
_TIMED = 3
"""Steps after them whose time is measured: a profiler slows steps down."""
_GRADIENT, _UPDATE, _BEGIN, _END = "lockstep: gradient ", "lockstep: update", "lockstep: begin", "lockstep: end"


def measure(config: RunConfig) -> Measured | None:
    """Train a few steps on the ranks of this process's world, in memory: nothing is saved and nothing is logged.

    Returns:
        on rank 0 the figures of the rank with the largest peak; None on other ranks.

    Raises:
        LockstepError: the config, the data or the model cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-measure-") as folder:
        trainer = Trainer(_short(config), run_dir=Path(folder) / "run", quiet=True)
        with trainer._join() as world:
            trainer.config = trainer.config.model_copy(update={"batch": trainer.config.batch.resolve(world.size)})
            task = trainer.task()
            prepared = trainer._prepare(task, world)
            here = _measure(trainer.config, prepared, world)
            everywhere = world.gather(here)
            if everywhere is None:
                return None
            return max(everywhere, key=lambda measured: measured.peak_bytes)


def _short(config: RunConfig) -> RunConfig:
    """The config without evaluations, and with few steps. The schedule of the learning rate does not matter here."""
    train = config.train.model_copy(
        update={
            "steps": _STEPS + _TIMED,
            "epochs": None,
            "min_steps": None,
            "eval_every_epochs": None,
            "eval_every_steps": 0,
            "stop_when": None,
            "max_time": None,
        }
    )
    log = config.log.model_copy(update={"flops": False, "pictures": 0, "writers": [], "model_summary": False})
    return config.model_copy(update={"train": train, "log": log})


def _measure(config: RunConfig, prepared: build.PreparedRun, world: World) -> Measured:
    state, device = prepared.state, devices.of(world.device)
    prepared.state.forward.train()
    memory = _StepMemory(state)
    batches = iter(prepared.batches)
    first: list[MicroBatch] = []
    for _ in range(_STEPS):
        micro_batches = next(batches)
        first = first or micro_batches
        memory.run(micro_batches, prepared.plan.samples(state.step))
    seconds = []
    for _ in range(_TIMED):
        micro_batches = next(batches)
        device.synchronize()
        begun = time.perf_counter()
        train_step(state, micro_batches, prepared.plan.samples(state.step))
        device.synchronize()
        seconds.append(time.perf_counter() - begun)
    flops = FlopCount(state.strategy, state.precision, compiled=config.compute.compile is not None)
    flops.add(first[:1])
    flops.count(first[0])
    counted = flops.take()
    return Measured(
        world=world.size,
        device=device.name(),
        strategy=config.parallel.strategy if world.size > 1 else "single",
        precision=config.precision,
        micro_batch=prepared.plan.micro_batch,
        accumulate=len(first),
        recompute=config.compute.activation_checkpointing,
        by="max_memory_allocated" if device.has_own_memory else "bytes of tensors",
        **memory.found,
        flops_per_sample=None if counted is None else counted / max(1, len(first[0].indices)),
        step_seconds=statistics.median(seconds),
    )


class _StepMemory:
    """Measures the memory of steps, and keeps the largest of each figure in `found`."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.device = state, devices.of(state.world.device)
        self.found: dict[str, Any] = {}
        self.held: dict[str, int] = {}

    def run(self, micro_batches: list[MicroBatch], samples: int) -> None:
        """Run a step, and measure it."""
        state = self.state
        # Gradients that lie in DDP's buckets are there before the step; see below.
        hooks = [
            parameter.register_post_accumulate_grad_hook(_mark_gradient)
            for parameter in state.forward.parameters()
            if parameter.requires_grad
        ]
        hooks.append(state.optimizer.register_step_post_hook(lambda *_: self._count()))
        self.held = {}
        self.device.reset_peak()
        with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:  # type: ignore[no-untyped-call]
            _mark(_BEGIN)
            train_step(state, micro_batches, samples)
            _mark(_END)
        for hook in hooks:
            hook.remove()
        if not self.held:
            return  # the update was skipped
        own = self.device.has_own_memory
        batch = 0 if own else _bytes(_tensors([each.collated for each in micro_batches[:1]]))
        events = list(_events(profile.kineto_results.events(), "CPU" if not own else "CUDA"))
        self._add(events, batch, len(micro_batches))

    def _count(self) -> None:
        """Count the states, after the update and before the gradients are freed."""
        _mark(_UPDATE)
        state, seen = self.state, set[int]()
        kept = [*state.forward.parameters(), *state.forward.buffers()]
        gradients = [parameter.grad for parameter in kept if isinstance(parameter, nn.Parameter)]
        self.held["parameters_bytes"] = self._bytes(kept, seen)
        self.held["gradients_bytes"] = self._bytes(gradients, seen)
        self.held["optimizer_bytes"] = self._bytes(list(state.optimizer.state.values()), seen)
        self.held["averages_bytes"] = self._bytes(list(state.averages.tensors.values()) if state.averages else [], seen)

    def _bytes(self, value: Any, seen: set[int]) -> int:
        here = self.device.device.type
        return _bytes((tensor for tensor in _tensors(value) if tensor.device.type == here), seen)

    def _add(self, events: list[tuple[str, int]], batch: int, passes: int) -> None:
        """Add the figures of a step to `found`.

        Args:
            events: allocations (name empty, bytes) and marks (name, 0), in their order.
            batch: bytes of the batch, where it lies in the memory that is measured.
        """
        states = sum(self.held.values())
        timeline, sum_so_far, at_update = [0], 0, 0
        grown, gradients, most = 0, 0, 0  # bytes since the beginning, of gradients among them, most without gradients
        for name, size in events:
            sum_so_far += size
            timeline.append(sum_so_far)
            if name == _UPDATE:
                at_update = sum_so_far
            elif name == _END:
                break
        peak = states + batch + max(timeline) - at_update
        found = dict(self.held) | {"batch_bytes": batch}
        if self.device.has_own_memory:
            found["peak_bytes"] = self.device.peak()
        else:
            found["peak_bytes"] = peak
        in_buckets = self.held["gradients_bytes"] > 0 and self._gradients_were_there(events)
        for name, size in events:
            if name == _UPDATE:
                break
            grown += size
            if name.startswith(_GRADIENT) and not in_buckets:
                gradients += int(name.removeprefix(_GRADIENT))
            most = max(most, grown - min(gradients, self.held["gradients_bytes"]))
        found["activations_bytes"] = most
        self.found = {name: max(value, self.found.get(name, 0)) for name, value in found.items()}

    def _gradients_were_there(self, events: list[tuple[str, int]]) -> bool:
        """Whether gradients lie in memory that was allocated before the step: less grew than there are gradients."""
        grown = 0
        for name, size in events:
            if name == _UPDATE:
                break
            grown += size
        return grown < self.held["gradients_bytes"] / 2


def _mark(name: str) -> None:
    """A mark among the events of the profiler."""
    with torch.autograd.profiler.record_function(name):
        pass


def _mark_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        _mark(f"{_GRADIENT}{local(parameter.grad).nbytes}")


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
    if isinstance(value, Tensor):
        yield local(value.detach())
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def task_of(config: RunConfig) -> Task:
    """The config's task."""
    return Trainer(config, quiet=True).task()
