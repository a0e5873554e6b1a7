"""A trained model: evaluated, asked for predictions, and exported. `Trainer` calls it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

import lockstep
from lockstep.core import caller, evaluation_run, resume, run_data, run_model, task_checks
from lockstep.core import evaluate as evaluation
from lockstep.core.checkpoint import choice
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.data.dataset import member_of
from lockstep.core.defaults import is_default
from lockstep.core.errors import LockstepError
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.sharded_tensor import gather_on_rank0
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.parallel.world import World
from lockstep.core.run_data import EvaluationData
from lockstep.core.run_model import SpreadModel
from lockstep.core.task import Samples, Task
from lockstep.lora import exports
from lockstep.trainer import (
    assemble,
    foreign,
    memory_shortage,
    prediction_run,
    run_export,
    run_record,
    training_state,
)
from lockstep.trainer.export import export_weights


@final
class TrainedModel:
    """The model of a run's checkpoint on this rank. All ranks call each method.

    Args:
        checkpoint: `newest`, `best` or a step. None: the best if the run keeps it, else the newest.
    """

    def __init__(self, setup: assemble.Setup, task: Task, world: World, checkpoint: str | int | None) -> None:
        self.setup, self.task, self.world, self.checkpoint = setup, task, world, checkpoint
        self.loaded_step: int | None = None
        """The step of the checkpoint that was loaded. None: nothing was loaded yet."""
        self.model: nn.Module | None = None
        """In evaluation mode. None: nothing was loaded yet, or this rank holds only shards."""

    def load(self) -> Strategy:
        """The model with the weights of the checkpoint (their moving average, if the run keeps one)."""

        def load(checkpoint: Checkpoint, built: SpreadModel) -> None:
            resume.load_trained_weights(checkpoint, built.strategy.unwrapped.model, self.world)

        strategy = self._built(load).strategy
        self.model = None if strategy.is_sharded else strategy.unwrapped.model.eval()
        return strategy

    def _built(self, load: Callable[[Checkpoint, SpreadModel], object]) -> SpreadModel:
        """The model with the weights that the task gives it. `load` is called with the checkpoint and the model."""
        self.model = None  # its memory may be needed
        self.setup = replace(self.setup, config=foreign.settle(self.setup.config, self.task, self.world))
        self.task = foreign.configured(self.task, self.setup.config)
        setup, retention = self.setup, self.setup.config.checkpoint
        chosen = choice.choose(setup.checkpoints, self.world, retention, self.checkpoint)
        assemble.set_up(setup, self.task, self.world, trained=True)
        built = run_model.build_model(setup.config, self.task, self.world)

        def load_into(checkpoint: Checkpoint) -> None:
            load(checkpoint, built)
            self.loaded_step = checkpoint.step

        lines = choice.read(setup.checkpoints, self.world, retention, self.checkpoint, load=load_into, chosen=chosen)
        if self.world.rank == 0 and not setup.quiet:
            changed = run_record.changed_source(setup.run_dir, self.task, setup.config)
            for text in (*lines, *built.messages, *changed):
                print(text, file=sys.stderr)
        return built

    # ---- evaluations and predictions

    def evaluate(self) -> dict[str, float]:
        """See `Trainer.evaluate`."""
        strategy, setup, world = self.load(), self.setup, self.world
        # All sets are opened first: a wrong path in the last is found before the first is evaluated.
        tasks = assemble.evaluated_tasks(setup, self.task, world)
        sets = [self._evaluation_data(name, task) for name, task in tasks.items()]

        def show(text: str) -> None:
            if world.rank == 0 and not setup.quiet:
                print(text, file=sys.stderr, flush=True)

        for line in (line for evaluated in sets for line in evaluated.limit()):
            show(line)
        report = evaluation_run.Report(lambda name, _, text: show(f"{name}:\n{text}" if name else text))
        precision = Precision(setup.config.precision, world.device)
        with memory_shortage.noted(setup.run_dir, setup.config, world), strategy.inference() as forward:
            return evaluation_run.evaluate(sets, forward, world=world, precision=precision, viewers=[report], tell=show)

    def _evaluation_data(self, name: str, task: Task) -> EvaluationData:
        """The evaluation data that are called `name`. An error says how to give others, if their path is not here."""
        config = self.setup.config
        try:
            micro_batch = memory_shortage.fitting(self.setup.run_dir, config, self.world).evaluation
            limit = config.data.eval_limit
            return run_data.evaluation_data(config, task, self.world, micro_batch=micro_batch, limit=limit, name=name)
        except LockstepError as error:
            source = config.data.eval_sources[name] or config.data.train
            if source and not os.path.exists(os.path.expanduser(source)):
                key = f"data.eval.{name}" if name else "data.eval"
                remedy = f"give the place of the data with {key}=PATH: {source!r} is neither a file nor a folder here"
                error.remedy = f"{error.remedy}; or {remedy}" if error.remedy else remedy
            raise

    def predict(self, data: Samples | None) -> list[Any]:
        """See `Trainer.predict`."""
        strategy, setup, world = self.load(), self.setup, self.world
        micro_batch = memory_shortage.fitting(setup.run_dir, setup.config, world).evaluation
        evaluated = run_data.evaluation_data(setup.config, self.task, world, data, micro_batch=micro_batch)
        precision = Precision(setup.config.precision, world.device)
        with memory_shortage.noted(setup.run_dir, setup.config, world), strategy.inference() as forward:
            outputs = evaluation.predict(
                self.task, forward, evaluated.loader, plan=evaluated.plan, world=world, precision=precision
            )
            return outputs or []

    def predict_rows(
        self,
        add: Callable[[list[dict[str, Any]], bool], None],
        wanted: prediction_run.Wanted,
        *,
        on_error: Literal["raise", "skip"] | None,
        begin: Callable[[int], None],
        by_row: bool,
        folder: Path | None,
    ) -> None:
        """See `Trainer.predict_rows`."""
        world = self.world
        if self.setup.kept.is_dir():
            assemble.set_up(self.setup, self.task, world, trained=True)
        presenter = task_checks.presenter(self.task)
        found = prediction_run.read_samples(self.task, presenter, world, wanted.inputs, wanted.samples)
        if world.rank == 0 and found.is_input and not self.setup.quiet:
            for note in member_of(found.data, "notes", ()):
                print(f"note: {note}", file=sys.stderr)
        strategy, config = self.load(), self.setup.config
        if on_error is not None:
            config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": on_error})})
        micro_batch = memory_shortage.fitting(self.setup.run_dir, config, world).evaluation
        evaluated = run_data.evaluation_data(config, self.task, world, found.data, micro_batch=micro_batch)
        if world.rank == 0:
            begin(len(found.data))
        with (
            memory_shortage.noted(self.setup.run_dir, config, world, begins_again=False),  # rows may be written already
            strategy.inference() as forward,
        ):
            outputs = evaluation.predict_each(
                self.task,
                forward,
                evaluated.loader,
                plan=evaluated.plan,
                world=world,
                precision=Precision(config.precision, world.device),
                finish=prediction_run.RowsAndFiles(presenter, found, by_row=by_row, folder=folder),
            )
            with contextlib.closing(outputs):
                for index, rows in outputs:
                    if isinstance(rows, evaluation.Unreadable):
                        add([found.head(index) | {"error": rows.what}], False)
                    else:
                        add(rows, True)

    # ---- exports

    def export(self, folder: Path, *, program: bool, merge: bool, force: bool) -> Path:
        """See `Trainer.export`."""
        model, task, world = self.load().unwrapped.model, self.task, self.world
        about = {"lockstep": lockstep.__version__, "run": self.setup.config.name}
        # Every rank gathers one tensor at a time. Rank 0 keeps the tensors in host memory, and writes.
        held = model.state_dict()
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        whole = {name: gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
        presenter, warnings = task.presenter(task), list[str]()
        presenter.merged, presenter.step = merge, self.loaded_step
        left_out = sorted(held.keys() - tensors.keys())
        if left_out and is_default(presenter.export_weights) and not exports.is_peft(model):
            warnings.append(
                f"the file holds tensors only. It leaves out what get_extra_state returned: {', '.join(left_out)}. "
                "lockstep export --optimizer writes all"
            )

        def add_files(staging: Path) -> None:
            warnings.extend(presenter.export(model, staging) or ())
            run_export.write_adapter_config(presenter, model, staging)
            run_export.copy_source(self.setup.run_dir, staging)
            if program:
                warnings.extend(run_export.write_program_of(task, presenter, held | whole, staging))

        def write() -> Path:
            name, weights = run_export.weights_of(task, presenter, model, held | whole)
            return export_weights(weights, folder, about, add_files, name, force=force)

        file = world.on_rank0(write)
        for text in [] if self.setup.quiet else warnings:
            print(f"warning: {caller.words(text)}", file=sys.stderr)
        return file

    def export_training_state(self, file: Path, *, force: bool) -> Path:
        """See `Trainer.export_training_state`."""

        def write(checkpoint: Checkpoint, built: SpreadModel) -> None:
            config, task = self.setup.config, self.task
            model, sharded = built.strategy.unwrapped.model, built.strategy.is_sharded
            optimizer = run_model.make_optimizer(config, task, model, built.blocks, sharded=sharded)
            self.world.on_rank0(
                lambda: training_state.write(
                    training_state.as_torch(checkpoint, model, optimizer, config, task_checks.schedule(task)),
                    file,
                    force=force,
                )
            )

        self._built(write)
        return file.resolve()
