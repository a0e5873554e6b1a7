"""The model of a run's checkpoint on this rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import final

from torch import nn

from lockstep.core import resume, run_data, run_model
from lockstep.core.checkpoint import choice
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.errors import LockstepError
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.parallel.world import World
from lockstep.core.run_data import EvaluationData
from lockstep.core.run_model import SpreadModel
from lockstep.core.task import Task
from lockstep.trainer import assemble, foreign, memory_shortage, run_record


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

        strategy = self.built(load).strategy
        self.model = None if strategy.is_sharded else strategy.unwrapped.model.eval()
        return strategy

    def built(self, load: Callable[[Checkpoint, SpreadModel], object]) -> SpreadModel:
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

    def evaluation_data(self, name: str, task: Task) -> EvaluationData:
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
