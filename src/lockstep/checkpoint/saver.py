"""Saving beside the training: copy to host memory, then write in a thread while the training goes on."""

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

from lockstep.checkpoint import files, store
from lockstep.checkpoint.store import Retention
from lockstep.dist.faults import fail_at
from lockstep.dist.sharding import Rows, rows_of
from lockstep.dist.world import World
from lockstep.errors import CheckpointError


class Saver:
    """Writes checkpoints of a run: every rank its share.

    A failure (disk full, no permission) is told at once, kept in `failures`, and does not end the training; what was
    saved before stays.

    Args:
        folder: of all checkpoints. tell: takes a message for people; called on rank 0, from any thread.
        in_background: return as soon as the state is in host memory.
    """

    def __init__(self, folder: Path, world: World, retention: Retention, tell: Callable[[str], None], in_background: bool = True) -> None:
        self.folder, self.retention, self.tell, self.in_background = folder, retention, tell, in_background
        self.world = world.in_background()
        self.failures: list[str] = []
        self.saved: int | None = None  # step of the newest checkpoint of this process
        self.blocked_s = 0.0  # how long the training waited for `save`, the last time
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.fault: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Save the state after `step`. Called on all ranks, with the same names and plain values; tensors are replicated or sharded.

        Waits for the checkpoint before. Returns when `tensors` may change again; or, not in the background, when all is done.
        """
        begun = time.perf_counter()
        self.wait()
        share = self._stage(tensors)
        fail_at("staged", step)
        self.thread = threading.Thread(target=self._run, args=(step, share, dict(values), dict(manifest)), name="lockstep-saver", daemon=True)
        self.thread.start()
        if not self.in_background:
            self.wait()
        self.blocked_s = time.perf_counter() - begun

    def wait(self) -> None:
        """Until the last checkpoint is on the disk, or has failed to get there."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.fault is not None:
            raise self.fault

    def finish(self) -> None:
        """Wait, and raise where a checkpoint is missing.

        Raises:
            CheckpointError: names the checkpoints that could not be written.
        """
        self.wait()
        if self.failures:
            newest = f"the newest is of step {self.saved}" if self.saved is not None else "this process wrote none"
            raise CheckpointError(
                f"{len(self.failures)} checkpoints could not be written, {newest}; the first: {self.failures[0]}",
                where=str(self.folder),
                remedy="free disk space or repair permissions, then run the same command",
            )

    def close(self) -> None:
        """Give a checkpoint that is being written a last chance; on the way out of a failed training."""
        if self.thread is not None:
            self.thread.join(10)

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Copies of this rank's share, in buffers that the next save uses again: fresh memory costs five times the copy."""
        held = {name: rows_of(tensor, number) for number, (name, tensor) in enumerate(tensors.items())}
        replicated = [name for name, rows in held.items() if rows.writer is None]
        owners = files.owners([held[name].local.nbytes for name in replicated], self.world.size)
        mine = {name for name, owner in zip(replicated, owners, strict=True) if owner == self.world.rank}
        mine |= {name for name, rows in held.items() if rows.writer and (rows.local.numel() or not rows.start)}
        on_device = False
        staged: dict[str, Rows] = {}
        for name in (name for name in tensors if name in mine):
            rows = held[name]
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != rows.local.shape or buffer.dtype != rows.local.dtype:
                buffer = torch.empty(rows.local.shape, dtype=rows.local.dtype, pin_memory=rows.local.is_cuda)
            staged[name] = replace(rows, local=buffer.copy_(rows.local, non_blocking=True))
            on_device |= rows.local.is_cuda
        if on_device:
            torch.cuda.current_stream(self.world.device).synchronize()
        self.buffers = {name: rows.local for name, rows in staged.items()}
        return staged

    def _run(self, step: int, share: Mapping[str, Rows], values: dict[str, Any], manifest: dict[str, Any]) -> None:
        try:
            self._write(step, share, values, manifest)
        except BaseException as error:  # a lost rank, or a fault of this code: the training must end
            self.fault = error

    def _write(self, step: int, share: Mapping[str, Rows], values: dict[str, Any], manifest: dict[str, Any]) -> None:
        mine: dict[str, Any] = {}
        try:
            staged = store.staging(self.folder, step)
            staged.mkdir(parents=True, exist_ok=True)
            fail_at("before-share", step)
            name = files.share_name(self.world.rank)
            mine["files"], mine["index"] = {}, {}
            if share:
                mine["files"][name], mine["index"] = files.write_share(staged / name, share, partial(self._reached, step))
            fail_at("after-share", step)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            mine = {"fault": f"rank {self.world.rank}: {error}"}
        shares = self.world.gather(mine)
        fault = self.world.broadcast(self._commit(step, shares, values, manifest) if shares is not None else None)
        if fault is None:
            self.saved = step
        else:
            self.failures.append(fault)

    def _prune(self, step: int) -> None:
        try:
            store.prune(self.folder, self.retention, newest=step)
        except OSError as error:
            self.tell(f"warning: old checkpoints could not be deleted: {error}")

    def _reached(self, step: int, place: str) -> None:
        self.world.heart.beats += 1  # a slow disk is no hang
        fail_at(place, step)

    def _commit(self, step: int, shares: list[dict[str, Any]], values: dict[str, Any], manifest: dict[str, Any]) -> str | None:
        """On rank 0, when all ranks have written: make it count. What went wrong, if anything."""
        fault = next((share["fault"] for share in shares if "fault" in share), None)
        try:
            if fault is None:
                manifest["files"] = {name: about for share in shares for name, about in share["files"].items()}
                index = files.merge(share["index"] for share in shares)
                store.commit(self.folder, step, manifest, index, values)
        except (OSError, RuntimeError) as error:
            fault = f"rank 0: {error}"
        if fault is None:
            self._prune(step)
            return None
        free = shutil.disk_usage(self.folder).free // 2**20 if self.folder.is_dir() else 0
        shutil.rmtree(store.staging(self.folder, step), ignore_errors=True)
        fault = f"the checkpoint of step {step} could not be written with {free} MiB free: {fault}"
        self.tell(f"warning: {fault}; training goes on, and what was saved before stays")
        return fault
