"""Saves checkpoints: copies the state to host memory, then writes it in a thread while the training continues."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.checkpoint import files, finite, store
from lockstep.core.checkpoint.host_buffers import buffers_like
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.errors import CheckpointError, TrainingError, number_of
from lockstep.core.held_folder import HeldFolder
from lockstep.core.parallel.faults import fail_at
from lockstep.core.parallel.sharded_tensor import LocalShard, local_shard, whole_rows
from lockstep.core.parallel.world import World


class Saver:
    """Writes the checkpoints of a run. Every rank writes a share of the tensors.

    If a checkpoint cannot be written (disk full, no permission), the user gets a message at once, `failures` keeps it,
    and the training continues; earlier checkpoints stay. A state that is not finite is not saved and ends the training.

    Args:
        folder: folder of all checkpoints.
        retention: which checkpoints stay.
        tell: shows a message to the user. Called on rank 0, from any thread.
        in_background: `save` returns as soon as the state is in host memory.
        allowed: tensors that need not be finite, see `finite.at_start`.
        held: the run directory. When a different folder takes its place, nothing is saved or deleted there, and the
            training ends. None: it is not checked.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        retention: CheckpointConfig,
        *,
        tell: Callable[[str], None],
        in_background: bool = True,
        allowed: Mapping[str, int] | None = None,
        held: HeldFolder | None = None,
    ) -> None:
        self.folder, self.retention, self.tell, self.in_background = folder, retention, tell, in_background
        self.allowed, self.held = allowed or {}, held
        self.world = world.in_background()
        self.failures: list[str] = []
        self.saved: int | None = None  # step of the newest checkpoint that this process wrote
        self.blocked_s = 0.0  # seconds that the last call of `save` took
        self.buffers: dict[str, Tensor] = {}
        self.writer_of: dict[str, int] = {}  # of replicated tensors: the number of the file
        self.thread: threading.Thread | None = None
        self.fault: BaseException | None = None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        """Save the state after `step`. Called on all ranks, after the previous checkpoint was written.

        Returns when `tensors` may change again; without `in_background`, when the checkpoint is written.

        Args:
            tensors: the same names on all ranks; replicated or sharded.
            values: state other than tensors, the same on all ranks.
            manifest: what manifest.json says, besides the files.

        Raises:
            TrainingError: on all ranks, if this or the previous state is not finite, or the run directory is now a
                different folder.
        """
        begun = time.perf_counter()
        self.wait()
        share = self._stage(tensors)
        fail_at("staged", step)
        self._start(partial(self._write, step, share, dict(values), dict(manifest)))
        self.blocked_s = time.perf_counter() - begun

    def add_metrics(self, step: int, metrics: Mapping[str, float], parts: Mapping[str, Any] | None = None) -> None:
        """Add the results of an evaluation to the checkpoint of `step`, once it is written. Called on all ranks.

        Args:
            parts: what the checkpoint keeps of the training's Parts from now on. None or empty: there are none.
        """
        if self.world.rank == 0:
            more = {"parts": dict(parts)} if parts else {}
            self._start(partial(self._add_metrics, step, dict(metrics), more))

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, or could not be written.

        Raises:
            TrainingError: on all ranks, if the checkpoint was refused; see `save`.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.fault is not None:
            raise self.fault

    def kept(self) -> str:
        """A sentence on the checkpoint from which the next start resumes. Waits for the thread, and raises nothing."""
        if self.thread is not None:
            self.thread.join()
        step = self._newest()
        if step is None:
            return "No checkpoint is saved"
        return f"The checkpoint of step {step} is saved, and the same command resumes from there"

    def _newest(self) -> int | None:
        return next((checkpoint.step for checkpoint in store.listed(self.folder)), None)

    def finish(self) -> None:
        """Wait for the last checkpoint at the end of a training.

        Raises:
            CheckpointError: checkpoints could not be written; says how many, and why the first.
            TrainingError: see `wait`.
        """
        self.wait()
        self._check_place_on_all()
        if self.failures:
            newest = f"the newest is of step {self.saved}" if self.saved is not None else "this process wrote none"
            raise CheckpointError(
                f"{number_of(len(self.failures), 'checkpoint')} could not be written, {newest}; the first: "
                f"{self.failures[0]}",
                where=str(self.folder),
                remedy="free disk space or repair permissions, then run the same command",
            )

    def close(self) -> None:
        """Wait up to 10 s for a checkpoint that is being written, when the training failed."""
        if self.thread is not None:
            self.thread.join(10)

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, LocalShard]:
        """Copy this rank's share into buffers. The next save uses them again: new memory takes five times as long.

        Virtual ranks write the files, if there are any: the files are the same on any number of ranks.
        """
        tensors = dict(sorted(tensors.items()))  # a restored optimizer has its state in a different order
        place = (self.world.rank % self.world.tensor, self.world.tensor)
        shards = {name: local_shard(tensor, number, place) for number, (name, tensor) in enumerate(tensors.items())}
        replicated = [name for name, shard in shards.items() if shard.writer is None]
        writers = self._files
        count = self.world.virtual_ranks or self.world.size
        owners = files.owners([shards[name].local.nbytes for name in replicated], count)
        self.writer_of = {name: owner for name, owner in zip(replicated, owners, strict=True) if owner in writers}
        mine = set(self.writer_of)
        mine |= {name for name, shard in shards.items() if shard.writer}
        share = {name: whole_rows(shards[name], tensors[name]) for name in tensors if name in mine}
        share = {name: shard for name, shard in share.items() if shard.local.numel() or not shard.start}
        local = {name: shard.local for name, shard in share.items()}
        device, host = devices.of(self.world.device), devices.of(torch.device("cpu"))
        apart = {name: tensor for name, tensor in local.items() if device.holds(tensor)}
        if _kinds(self.buffers) != _kinds(local):
            self.buffers = {}  # before there are new ones
            here = {name: tensor for name, tensor in local.items() if name not in apart}
            new = buffers_like(apart, device) | buffers_like(here, host)
            self.buffers = {name: new[name] for name in local}
        for name, tensor in local.items():
            self.buffers[name].copy_(tensor, non_blocking=name in apart)
        if apart:
            device.current_stream().synchronize()
        return {name: replace(shard, local=self.buffers[name]) for name, shard in share.items()}

    @property
    def _files(self) -> range:
        """The numbers of the files that this rank writes: with virtual ranks, one for each of them."""
        rank = self.world.rank
        return range(rank, rank + 1) if self.world.virtual_ranks is None else self.world.data_ranks

    def _start(self, work: Callable[[], None]) -> None:
        """Do `work` in a thread, after the work that was started before. Without `in_background`, wait for it."""
        before = self.thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                if self.fault is None:
                    work()
            except BaseException as error:  # a rank is lost, or this code is wrong: the training must end
                self.fault = error

        self.thread = threading.Thread(target=run, name="lockstep-saver", daemon=True)
        self.thread.start()
        if not self.in_background:
            self.wait()

    def _write(
        self, step: int, share: Mapping[str, LocalShard], values: dict[str, Any], manifest: dict[str, Any]
    ) -> None:
        not_finite = finite.faults({name: shard.local for name, shard in share.items()}, self.allowed)
        mine = {"not_finite": not_finite} if not_finite else self._write_share(step, share)
        shares = self.world.gather(mine)
        fault = self.world.broadcast(self._commit(step, shares, values, manifest) if shares is not None else None)
        if isinstance(fault, TrainingError):
            raise fault
        if fault is None:
            self.saved = step
        else:
            self.failures.append(fault)

    def _write_share(self, step: int, share: Mapping[str, LocalShard]) -> dict[str, Any]:
        """The `files` and `index` that this rank wrote, or the `fault` that kept it from writing."""
        written: dict[str, Any] = {}
        index: files.Index = {}
        try:
            self.check_place()
            staged = store.staging(self._anchored, step)
            staged.mkdir(parents=True, exist_ok=True)
            fail_at("before-share", step)
            by_writer: dict[int, dict[str, LocalShard]] = {}
            for tensor, shard in share.items():
                by_writer.setdefault(self.writer_of.get(tensor, self._files[0]), {})[tensor] = shard
            for writer, mine in by_writer.items():
                name = files.share_name(writer)
                written[name], part = files.write_share(staged / name, mine, partial(self._reached, step))
                index |= part
            fail_at("after-share", step)
        except TrainingError as error:
            return {"lost": error}
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            return {"fault": f"rank {self.world.rank}: {error}"}
        return {"files": written, "index": index}

    def _add_metrics(self, step: int, metrics: dict[str, float], more: dict[str, Any]) -> None:
        """Runs on rank 0."""
        try:
            self.check_place()
            if store.add_metrics(self._anchored, step, metrics, **more):
                self._prune(step)
        except (OSError, TrainingError) as error:  # `finish` and the next save check the place again
            self.tell(f"warning: the checkpoint of step {step} stays without the metrics of its evaluation: {error}")

    def _lost(self, shares: list[dict[str, Any]]) -> TrainingError | None:
        """The error if a rank's run directory is a different folder now. This rank checks again after the writes."""
        lost: TrainingError | None = next((share["lost"] for share in shares if "lost" in share), None)
        try:
            self.check_place()
        except TrainingError as error:
            lost = lost or error
        return lost

    @property
    def _anchored(self) -> Path:
        """The folder of the checkpoints in the run directory that is held. Nothing is written or deleted elsewhere."""
        return self.folder if self.held is None else self.held.anchored(self.folder)

    def check_place(self) -> None:
        """Check that the run directory is the folder that it was.

        Raises:
            TrainingError: it is another one, or none.
        """
        if self.held is not None:
            self.held.check()

    def _check_place_on_all(self) -> None:
        """Check the run directory on all ranks before any of them leaves the training and may delete it."""
        fault: TrainingError | None = None
        try:
            self.check_place()
        except TrainingError as error:
            fault = error
        faults = self.world.gather(fault)
        first = self.world.broadcast(next(filter(None, faults), None) if faults is not None else None)
        if fault or first:
            raise fault or first

    def _prune(self, step: int) -> None:
        try:
            store.prune(self._anchored, self.retention, newest=step)
        except OSError as error:
            self.tell(f"warning: old checkpoints could not be deleted: {error}")

    def _reached(self, step: int, place: str) -> None:
        self.world.heartbeat.beats += 1  # so that a slow disk is not taken for a hang
        fail_at(place, step)

    def _commit(
        self, step: int, shares: list[dict[str, Any]], values: dict[str, Any], manifest: dict[str, Any]
    ) -> str | TrainingError | None:
        """Complete the checkpoint on rank 0, after all ranks have written. Returns what went wrong; None if nothing."""
        for rank, share in enumerate(shares):
            if "not_finite" in share:
                shutil.rmtree(store.staging(self._anchored, step), ignore_errors=True)
                refusal = finite.refusal(share["not_finite"], rank, step, self._newest())
                if self.in_background:  # the training gets the error only when it waits for this checkpoint
                    self.tell(f"error: {refusal}")
                return refusal
        if (lost := self._lost(shares)) is not None:
            return lost
        fault = next((share["fault"] for share in shares if "fault" in share), None)
        try:
            if fault is None:
                manifest["files"] = {name: about for share in shares for name, about in share["files"].items()}
                index = files.merge(share["index"] for share in shares)
                store.commit(self._anchored, step, manifest, index=index, values=values)
        except (OSError, RuntimeError) as error:
            fault = f"rank 0: {error}"
        if fault is None:
            self._prune(step)
            return None
        free = shutil.disk_usage(self.folder).free // 2**20 if self.folder.is_dir() else 0
        shutil.rmtree(store.staging(self._anchored, step), ignore_errors=True)
        fault = f"the checkpoint of step {step} could not be written with {free} MiB free: {fault}"
        self.tell(f"warning: {fault}; training continues, and earlier checkpoints stay")
        return fault


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
