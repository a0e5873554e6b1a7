"""Known answers on all ranks, over a time, and which ranks differ."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.parallel.world import World
from lockstep.launch.device_check import cases as known
from lockstep.launch.device_check import exchanges, memory
from lockstep.launch.device_check.cases import Case

_SIZE_CPU, _SIZE_GPU = 256, 2048
_MEMORY_SHARE = 0.5
_MEMORY_CPU = 1 << 28
_HOST_EVERY = 16  # every 16th result is compared on the host, the others on the device


@dataclass
class Tally:
    """The runs of a case on a rank."""

    runs: int = 0
    wrong: int = 0
    first: str = ""
    """The first wrong result, in words."""
    digest: str = ""
    """Of the bits of the first result; empty for memory and exchanges."""
    skipped: str = ""
    """Why the case did not run; empty if it ran."""

    def add(self, wrong: str | None) -> None:
        """Count a run."""
        self.runs += 1
        if wrong is not None:
            self.wrong += 1
            self.first = self.first or f"run {self.runs}: {wrong}"


@dataclass(frozen=True)
class DeviceReport:
    """What a rank has found."""

    rank: int
    node: str
    device: str
    """The device and its model, and its identity if it has one."""
    kind: str
    """Devices of the same kind compute the same bits: the model, and the version of torch."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """By the label of the case."""

    @property
    def runs(self) -> int:
        """Number of compared results."""
        return sum(tally.runs for tally in self.tallies.values())

    @property
    def wrong(self) -> int:
        """Number of wrong results."""
        return sum(tally.wrong for tally in self.tallies.values())


def check(world: World, *, seconds: float = 20.0, memory_share: float = _MEMORY_SHARE) -> list[DeviceReport]:
    """Compute, store and exchange known values repeatedly, on every rank. A collective.

    Args:
        seconds: the time for operations; each runs at least twice. Memory and exchanges take additional time.
        memory_share: the fraction of a device's free memory that is tested. Of the host's memory, 256 MiB are.

    Returns:
        the reports of all ranks, on every rank.
    """
    device = devices.of(world.device)
    model, identity = device.name() or str(world.device), device.identity()
    kind = f"{model}, torch {torch.__version__}" + ("" if device.has_own_memory else f", {_cpu()}")
    shown = f"{world.device} {model}".strip() + (f" {identity}" if identity else "")
    report = DeviceReport(world.rank, world.nodes.names[world.rank], shown, kind)
    with _settings():
        _operations(world, report, seconds)
        _memory(world, report, memory_share)
        if world.size > 1:
            for label, wrong in exchanges.check(world):
                report.tallies.setdefault(label, Tally()).add(wrong)
    reports: list[DeviceReport] = world.broadcast(world.gather(report))
    return reports


def wrong_answers(device: torch.device) -> list[str]:
    """The labels of the cases that this device computes wrongly, each run twice. It takes some seconds."""
    report = DeviceReport(0, "", "", "")
    with _settings():
        _operations(World(0, 1, 0, device), report, 0.0)
    return [label for label, tally in report.tallies.items() if tally.wrong]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Inside, kernel choices are reproducible, and 16-bit products are accumulated in 32 bits."""
    matmul, cudnn, threads = torch.backends.cuda.matmul, torch.backends.cudnn, torch.get_num_threads()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = [getattr(matmul, name) for name in names]
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    for name in names:
        setattr(matmul, name, False)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = True, False, False
    torch.set_num_threads(1)  # sums over several threads differ in bits
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = flags
        torch.set_num_threads(threads)


def _operations(world: World, report: DeviceReport, seconds: float) -> None:
    device = devices.of(world.device)
    is_cuda = world.device.type == "cuda"
    found = list(
        known.cases(_SIZE_GPU if device.has_own_memory else _SIZE_CPU, has_float64=device.has_float64, has_tf32=is_cuda)
    )
    ready: list[_OnDevice] = []
    for case in found:
        tally = report.tallies.setdefault(case.label, Tally())
        try:
            ready.append(_OnDevice(case, tally, world.device))
        except (NotImplementedError, RuntimeError) as error:
            if device.is_shortage(error) or (is_cuda and not isinstance(error, NotImplementedError)):
                raise
            tally.skipped = str(error).splitlines()[0]
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for one in ready:
            one.run()
        world.heartbeat.beats += 1
        if turn and time.perf_counter() >= end:
            return


class _OnDevice:
    """A case with its inputs on the device. Creating it makes the first run."""

    def __init__(self, case: Case, tally: Tally, device: torch.device) -> None:
        self.case, self.tally = case, tally
        self.inputs = [tensor.to(device) for tensor in case.inputs]
        self.first = self._compute()
        on_host = self.first.cpu()
        wrong = known.first_wrong(case, on_host)
        tally.add(wrong)
        self.right = on_host if wrong is None else None
        tally.digest = _digest(on_host)

    def _compute(self) -> Tensor:
        with torch.no_grad():
            return self.case.compute(*self.inputs)

    def run(self) -> None:
        """Compute again: the result must be bitwise equal."""
        result = self._compute()
        compares_on_host = self.right is None or self.tally.runs % _HOST_EVERY == 0
        if not compares_on_host and torch.equal(result, self.first):
            self.tally.add(None)
            return
        on_host = result.cpu()
        wrong = known.first_wrong(self.case, on_host)
        if wrong is None and self.right is not None and not torch.equal(on_host, self.right):
            differing = on_host != self.right
            place = int(differing.flatten().nonzero()[0])
            wrong = "different bits than the first run: "
            wrong += known.described(on_host, self.right.double(), place, int(differing.sum()))
        if wrong is None and not compares_on_host:
            wrong = "the device found two equal results different"
        self.tally.add(wrong)
        self.right = on_host if wrong is None else self.right


def _memory(world: World, report: DeviceReport, share: float) -> None:
    free = devices.of(world.device).free_memory()
    size = int(free[0] * share) if free is not None and devices.of(world.device).has_own_memory else _MEMORY_CPU
    for name, wrong in memory.check(size, world.device):
        report.tallies.setdefault(f"memory, {name}", Tally()).add(wrong)
        world.heartbeat.beats += 1


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _cpu() -> str:
    """The model of this CPU and the instructions that torch uses: with different ones, sums have different bits."""
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
