"""Checks after the first steps, and before each checkpoint, that a resumed run gets all that training changes."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core import task_checks
from lockstep.core.block_state import written_by_pass
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.form import Kind, described, kinds
from lockstep.core.data.randomness import restored_generators, seed_all
from lockstep.core.errors import LockstepError, TrainingError, listed
from lockstep.core.part import Training
from lockstep.parts.checks.left_out import LeftOut
from lockstep.parts.checks.outside_state import OutsideState
from lockstep.parts.checks.rounding import LostUpdates
from lockstep.parts.replicas import differing, digests_of


class FirstSteps(BuiltInPart):
    """Compares the state that would be saved with the state of a newly built model: names, shapes and dtypes.

    Buffers may change their shape, and extra states may be anything: a checkpoint restores them. If they changed,
    rank 0 builds the model once more and loads them. State outside of what is saved is also examined.

    Create it before anything runs the model.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.loads: Mapping[str, Kind] = kinds(run.model.state_dict())
        """The form of a state that a newly built model is known to load."""
        self.tried: set[str] = set()
        """Names of tensors whose form differs from a new model's, and that one has loaded."""
        self.left_out = LeftOut(run)
        self.outside = OutsideState(run.model, run.task) if run.state.world.rank == 0 else None
        self._first = run.state.step
        self._written, self._lost_updates = _Written(run), LostUpdates(run)
        self._look()

    # ---- events

    def before_step(self, training: Training) -> None:
        if training.step == self._first:
            self._written.watch()
            self._lost_updates.watch()

    def after_step(self, training: Training) -> None:
        """Check the first two steps of a process, and no other. A collective.

        Raises:
            TrainingError: on all ranks; names the tensors.
        """
        done = training.step - self._first
        self._look()
        if done == 1:
            self._written.report()
            self._warn(self._lost_updates.warnings())
            self._check_replicas()
            self.run.state.strategy.begin_step()
            self.check_loadable()
        else:
            self.left_out.check()  # a copy of what trains begins to move in the second step
            self._warn(self.outside.warnings() if self.outside is not None else [])
            assert isinstance(training, Inside)
            training.left |= {"before_step", "after_step"}

    def before_save(self, training: Training) -> None:
        self.check_loadable()

    # ---- checks

    def _check_replicas(self) -> None:
        """Check that all ranks hold the same parameters, if each holds all of them.

        Raises:
            TrainingError: on all ranks; names the first parameter that differs.
        """
        state, world = self.run.state, self.run.state.world
        if state.strategy.is_sharded or world.size == 1:
            return
        by_rank = world.gather(digests_of(dict(self.run.model.named_parameters())))
        found = world.broadcast(differing(by_rank) if by_rank is not None else None)
        if found:
            raise TrainingError(
                f"after step {state.step} the ranks do not hold the same parameters: {found[0].who} in {found[0].name}",
                where="Task.model",
                remedy="change parameters only with the optimizer. What forward passes compute from samples, such as a "
                "codebook, belongs in buffers (register_buffer): every rank gets those of rank 0",
            )

    def _look(self) -> None:
        if self.outside is not None:
            self.outside.look()

    def _warn(self, texts: list[str]) -> None:
        warnings = self.run.warnings
        for text in texts:
            if text not in warnings:
                warnings.append(text)
                self.run.tell(text)

    def check_loadable(self) -> None:
        """Check that a newly built model can load the state, and that state outside it has not changed.

        All ranks call it, after synchronising their buffers.

        Raises:
            TrainingError: on all ranks; names the tensors, and how they differ.
        """
        self.left_out.check()
        world, state = self.run.state.world, self.run.state
        found = kinds(self.run.model.state_dict())
        code = zlib.crc32(repr(sorted(found.items())).encode())
        if world.all_max(code) != -world.all_max(-code):
            self._refuse_uneven(found)
        if found == self.loads:
            return
        new = self.run.form
        if names := new.misfits(found):
            remedy = "create all parameters in the model's constructor, with their final shapes and dtypes. "
            remedy += "A tensor that changes its shape must be a buffer (register_buffer)"
            if state.strategy.is_sharded:
                remedy += ", and parallel.strategy ddp or single: with fsdp, a buffer keeps its shape"
            raise TrainingError(
                f"after step {state.step} a checkpoint of this run could not be loaded: "
                f"{described(new.kinds, found, names)}",
                where="Task.model",
                remedy=f"{remedy}. Then start again with --fresh",
            )
        changed = {name for name, of in found.items() if new.kinds.get(name, ()) != of}
        if changed - self.tried and not state.strategy.is_sharded:
            world.on_rank0(self._try_to_load)
            self.tried |= changed
        self.loads = found

    def _refuse_uneven(self, found: Mapping[str, Kind]) -> None:
        world = self.run.state.world
        of_rank0: Mapping[str, Kind] = world.broadcast(found)
        names = of_rank0.keys() | found.keys()
        differing = sorted(name for name in names if of_rank0.get(name, ()) != found.get(name, ()))
        by_rank = world.broadcast(world.gather((world.rank, differing)))
        rank, names_there = next((rank, names) for rank, names in by_rank if names)
        raise TrainingError(
            f"after step {self.run.state.step} the state of rank {rank} has a different form than that of rank 0: "
            f"{', '.join(names_there[:5])}",
            where="Task.model",
            remedy="keep values that depend on samples in buffers: every rank gets the buffers of rank 0. "
            "get_extra_state must return the same form on all ranks",
        )

    def _try_to_load(self) -> None:
        """Let a newly built model load the state, in host memory."""
        run = self.run
        tensors, values = checkpoint_state.capture(run.model, run.state.optimizer)
        of_model = ((name, tensor.cpu()) for name, tensor in tensors.items() if name.startswith("model."))
        plain = {name: value for name, value in values.items() if name.startswith("model.")}
        with restored_generators(run.state.world.device), torch.device("cpu"):
            seed_all(run.state.seed)
            try:
                model = task_checks.model(copy.copy(self.run.task))  # it may keep the model in an attribute
                checkpoint_state.restore(of_model, plain, model)
            except LockstepError:
                raise
            except Exception as error:
                raise TrainingError(
                    f"after step {run.state.step} the model cannot be built again, which a resumed run must do: "
                    f"{type(error).__name__}: {error}",
                    where="Task.model",
                    remedy="let Task.model return a new model at every call",
                ) from error


class _Written:
    """What the forward passes of the first step of a process write.

    With passes of other sizes, or another number of them, such a model is trained otherwise: a note says so. Where
    it is a parameter, checkpoints keep the number of passes; see `resume.restore`.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.names, self.step = run, set[str](), run.state.step
        self.handles: list[Any] = []

    def watch(self) -> None:
        """Note what the passes write from now on."""
        run, stack = self.run, contextlib.ExitStack()
        forward, compiled = run.state.strategy.unwrapped, run.is_compiled

        def begin(module: torch.nn.Module, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                stack.enter_context(written_by_pass(run.model, self.names, is_compiled=compiled))

        def end(*_: Any) -> None:
            stack.close()
            moved = self.names & {name for name, _ in run.model.named_parameters()}
            run.moves_in_passes = sorted(moved.union(run.moves_in_passes))  # now: the step may end with a save

        self.handles = [forward.register_forward_pre_hook(begin), forward.register_forward_hook(end, always_call=True)]

    def report(self) -> None:
        """Say what was written, and watch no longer."""
        for handle in self.handles:
            handle.remove()
        run = self.run
        if self.names:
            kept = ": it determines the training here" if run.moves_in_passes else ""
            run.tell(
                f"note: each forward pass changes {listed(sorted(self.names))}, once for each of the "
                f"{run.plan.count(self.step)} micro-batches of a step: with another batch.micro or number of ranks, "
                f"another model is trained{kept}"
            )
