"""`Loop`: a user's own training loop, with the promises of `Trainer`.

It assembles a run in the same way as `Trainer`, and makes each step by the same function. The body of the loop computes
the losses.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.configs import config_file
from lockstep.core import caller, evaluate, keywords, loop, optimizer_class, run_data
from lockstep.core.defaults import is_default
from lockstep.core.errors import UsageError
from lockstep.core.parallel import signals
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.sharded_tensor import gather_on_rank0
from lockstep.core.part import Part
from lockstep.core.step import StepResult
from lockstep.trainer import assemble, memory_shortage, user_exit, user_trial
from lockstep.trainer.loop_state import LoopState, LoopStatePart, check_scheduler
from lockstep.trainer.user_loop_task import (
    LoopEvaluation,
    LoopTask,
    Units,
    check_keys,
    from_loader,
    joined,
    nested,
    write_weights,
)
from lockstep.trainer.user_step import LoopStep, StepsOfEpoch
from lockstep.updates.players import Turns


@final
@keywords.speaks_python
class Loop:
    """A training whose loop you write:

        loop = lockstep.Loop(model, optimizer, train_data, global_batch=256, epochs=3, run_dir="runs/mine")
        for step in loop:
            for x, y in step:
                loss = cross_entropy(loop.model(x), y)
                step.backward(loss)

    `python script.py` runs it on one process. `lockstep run --nproc 2 script.py` and torchrun run it on several. The
    same command resumes it.

    Args:
        model: any module, or a dict of modules. It is moved to the device of the rank.
        optimizer: of its parameters; or a dict of optimizers that update in turn, by `step.turn(name)`.
        train_data: a map-style data set, a `lockstep.Stream`, or a DataLoader, whose data set, batch size, workers and
            `collate_fn` are used.
        global_batch: samples of an update, over all ranks. None: the batch size of the DataLoader, else 32.
        micro_batch: largest number of samples of a forward pass. None: one forward pass for each update and rank.
        epochs, steps: the length of the training: one of them.
        scheduler: a torch scheduler whose `step()` the loop calls. Schedulers that the body steps are not given here.
            All schedulers of the optimizer are saved and restored.
        scheduler_every: whether `scheduler` steps after each update (`step`) or after the last of an epoch (`epoch`).
        clip_norm: largest norm of the gradient. None: no clipping.
        precision: fp32, bf16 or fp16: of the forward pass, by autocast.
        strategy: how the model is spread over ranks: ddp or fsdp.
        collate: makes a batch of a list of samples. None: torch's `default_collate`.
        units: a function from a batch to its number of units, if that is known before the loss. None: `step.backward`
            says it.
        workers: loader processes of each rank.
        seed: of the order of samples, of each sample and of each forward pass.
        run_dir: the folder of the run. None: `runs/NAME`, with the name of the script.
        fresh: delete the run that the folder holds. Otherwise it is resumed.
        config: more keys of the config by dotted path, such as `{"checkpoint.every_steps": 100}`.
        parts: objects of `lockstep.Part`.
        quiet: print nothing.

    Raises:
        UsageError: an argument cannot be used; names it and the remedy.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        train_data: Any,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        scheduler: Any = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
        strategy: Literal["ddp", "fsdp"] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        units: Units | None = None,
        workers: int | None = None,
        seed: int | None = None,
        run_dir: str | Path | None = None,
        fresh: bool = False,
        allow_change: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        parts: Sequence[Part] = (),
        quiet: bool = False,
    ) -> None:
        several = dict(optimizer) if isinstance(optimizer, Mapping) else None
        module: Any = model
        single: Any = optimizer
        if several is not None:
            module, single = joined(model, several, {"units": units, "scheduler": scheduler})
        check_scheduler(scheduler, single, scheduler_every)
        loader = from_loader(train_data)
        batch = {"global": global_batch or loader.batch_size, "micro": micro_batch}
        chosen = {
            "batch": {key: value for key, value in batch.items() if value is not None},
            "train": {"epochs": epochs, "steps": steps},
            "optim.clip_norm": clip_norm,
            "precision": precision,
            "parallel.strategy": strategy,
            "data.workers": workers if workers is not None else loader.workers,
            "data.drop_last": loader.drop_last or None,
            "seed": seed,
            "log.flops": False,  # it would call the body of the loop once more
            "name": caller.script_name(),
        }
        keys = nested({key: value for key, value in chosen.items() if value is not None})
        keys["train"] = {key: value for key, value in keys["train"].items() if value is not None}
        for section, value in nested(config or {}).items():
            keys[section] = keys.get(section, {}) | value if isinstance(value, dict) else value
        self._trial = trial = user_trial.take()
        if trial is not None:
            keys, run_dir, fresh = trial.changed(keys), trial.folder, False
            parts = (*parts, *trial.parts)
        parsed = config_file.parse(keys, needs_task=False)
        if parsed.train.epochs is None and parsed.train.steps is None:
            remedy = "give epochs=3, or steps=1000"
            raise UsageError("the length of the training is not given", where="Loop(...)", remedy=remedy)
        check_keys(parsed)
        self._task = LoopTask(
            module, single, loader.data, several=several, collate=collate or loader.collate, units=units
        )
        if trial is not None:
            trial.prepare(self._task)
        self._optimizer, self._scheduler = single, scheduler
        self._scheduler_every, self._scheduled = scheduler_every, getattr(scheduler, "last_epoch", None)
        self._kept = LoopStatePart(single, scheduler)
        self.state: LoopState = self._kept.state
        """Yours, saved and restored: numbers, texts, tensors, nested lists and dicts, and objects with `state_dict`.
        Equal on all ranks."""
        self.results: Mapping[str, float] = {}
        """The last value of everything logged, when the loop has ended."""
        folder = Path(run_dir) if run_dir is not None else Path("runs") / parsed.name
        setup = assemble.Setup(
            parsed,
            folder,
            fresh or user_exit.is_fresh(),
            caller.keys_of(allow_change),
            quiet,
            parts=(*parts, self._kept),
            by_loop=True,
        )
        user_exit.close_open()
        self._exit = user_exit.Exit(self._leave, quiet=quiet)
        self._step: LoopStep | None = None
        self._engine: Any = None
        self._has_left = False
        self._evaluated: dict[int, tuple[Any, run_data.EvaluationData]] = {}
        with self._exit.guarded():
            flag = self._exit.training.enter_context(signals.listening())
            world = self._exit.world.enter_context(assemble.joined(parsed, folder))
            self._assembled = self._exit.training.enter_context(assemble.assemble(setup, self._task, world, flag=flag))
        for one in {single, *optimizer_class.members(single)}:
            self._exit.training.callback(one.register_step_pre_hook(self._refuse_update).remove)
        self._run = self._assembled.run
        bound = getattr(self._run.update, "__self__", None)  # with several optimizers: see `updates.arrange`
        self._turns = bound if isinstance(bound, Turns) else None
        self._kept.restore_rates()
        self._scheduled = getattr(scheduler, "last_epoch", None)
        self._id = str(self._run.world.broadcast(uuid.uuid4().hex))
        if trial is not None:
            with self._exit.guarded():
                trial.joined(self)

    # ---- the loop

    def __iter__(self) -> Generator[LoopStep, None, None]:
        """The steps, from the one at which the run stopped."""
        if self._engine is not None:
            remedy = "make another Loop, with another run_dir"
            raise UsageError("it was iterated over before", where="for step in loop", remedy=remedy)
        for note in self._kept.check_all_found():
            self._run.tell(note)
        is_first = True
        run, self._engine = self._run, self._assembled.steps()
        per_epoch = run.plan.steps_per_epoch
        try:
            with self._exit.guarded():
                try:
                    asked = next(self._engine)
                    while True:
                        if not run.model.training:  # the body has evaluated it
                            run.state.forward.train()
                        self._step = step = LoopStep(
                            run.state,
                            asked,
                            steps_per_epoch=per_epoch,
                            stop=run.stop,
                            counts_late=is_default(run.task.weight),
                            begins=self._adopt_rates,
                            updated=self._updated,
                            turns=self._turns,
                        )
                        yield step
                        result = step.finished()
                        if result is None:
                            raise step.incomplete()
                        if is_first:
                            self._kept.check_none_is_late()
                            is_first = False
                        asked = self._engine.send(result)
                except StopIteration as end:
                    self._ended(end.value)
        except GeneratorExit:  # the script left the loop, or an exception did
            self._has_left = True
            if run.world.size == 1:  # otherwise the ranks first agree that all have left: see `_leave`
                self._leave()
            raise

    def epochs(self) -> Iterator[tuple[int, Iterator[LoopStep]]]:
        """The epochs, from the one in which the run stopped: its number from 0, and its steps.

            for epoch, steps in loop.epochs():
                for step in steps:
                    for x, y in step:
                        step.backward(cross_entropy(loop.model(x), y))
                accuracy = ...

        What follows the steps in the body belongs to the last step of the epoch: the checkpoint of that step has it.

        Raises:
            UsageError: the body left the steps of an epoch before their end, and not the whole loop.
        """
        steps = self.__iter__()
        try:
            for step in steps:
                rest = StepsOfEpoch(step, steps)
                yield step.epoch, iter(rest)
                if not rest.is_done:
                    what = f"the script left epoch {step.epoch} after step {self._run.state.step}, and began another"
                    remedy = "leave both loops to end the training, or go through all steps of the epoch"
                    raise UsageError(what, where="loop.epochs()", remedy=remedy)
        finally:
            steps.close()

    def _ended(self, results: Mapping[str, float]) -> None:
        self.results, self._step = results, None
        if self._trial is not None:  # nothing of the script after its loop is wanted
            self._trial.ended(self)
            self._exit.close()
            raise SystemExit(0)
        self._exit.end_training()

    def _updated(self, result: StepResult) -> None:
        scheduler, step = self._scheduler, self._step
        if scheduler is None:
            return
        if getattr(scheduler, "last_epoch", None) != self._scheduled:
            remedy = "leave it out there; or leave out Loop(scheduler=...): the scheduler is saved all the same"
            what = "the body called scheduler.step(), as the loop does"
            raise UsageError(what, where=f"step {self._run.state.step}", remedy=remedy)
        if result.applied if self._scheduler_every == "step" else step is not None and step.ends_epoch:
            scheduler.step()
        self._scheduled = getattr(scheduler, "last_epoch", None)

    def _refuse_update(self, *_: Any) -> None:
        if self._step is not None:
            self._step.refuse_update()

    def _adopt_rates(self) -> None:
        """The learning rates are the script's: those that it, or its scheduler, has set count."""
        for group in self._optimizer.param_groups:
            group["base_lr"] = float(group["lr"])

    def _leave(self) -> None:
        """If the script left the loop early: save the state of the last step. All ranks call it.

        Raises:
            RankError: other ranks have not left after the same step; names the ranks.
        """
        step, engine = self._step, self._engine
        if step is None or not self._has_left:
            return
        self._step = None
        is_partial = step.result is None and step.has_begun
        done = step.number if is_partial or step.result is not None else step.number - 1
        user_exit.check_all_left(self._run.world, self._id, done, complete=not is_partial)
        if is_partial:
            text = f"the script left its loop in the middle of step {step.number}, which is not saved"
            self._run.tell(text)
        else:
            try:
                if step.result is not None:
                    engine.send(step.finished())  # the log and the checkpoint that are due after this step
                engine.throw(loop.LeftLoop())
            except StopIteration as end:  # it was the last step
                self.results = end.value
            except loop.LeftLoop:
                pass
        engine.close()
        if self._trial is not None:
            self._trial.ended(self)
        self._exit.end_training()

    # ---- what the body of the loop may ask for

    @property
    def model(self) -> nn.Module:
        """Your model, on the device of this rank. Call it as before: it needs no wrapper."""
        return self._run.model

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._run.world.device

    @property
    def rank(self) -> int:
        """This process: 0 to `ranks` - 1."""
        return self._run.world.rank

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self._run.world.size

    @property
    def is_main(self) -> bool:
        """True on one rank, which prints and writes."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps that are done, those before a restart included."""
        return self._run.state.step

    def log(self, **values: float) -> None:
        """Add numbers to the next entry of the log, as `script/NAME`. Call it in the body of the loop, on all ranks."""
        training = self._kept.training
        if training is None:
            raise UsageError("no step has begun", where="loop.log", remedy="call it in the body of the loop")
        for name, value in values.items():
            training.log(f"script/{name}", value)

    def evaluate(
        self, data: Any, metrics: Any, predict: Callable[[Any], Any] | None = None
    ) -> float | dict[str, float]:
        """Evaluate the model: each sample of `data` counts once, on any number of ranks. All ranks call it.

        Args:
            data: a map-style data set, or a DataLoader: its data set and its `collate_fn` are used.
            metrics: a torchmetrics metric, a collection, or a dict of metrics.
            predict: from the inputs of a batch to the model's output. None: `loop.model`. Metrics are updated with
                (output, target) of batches that are pairs (inputs, target). For other batches it gets the whole batch,
                and returns the pair (output, target).

        Returns:
            the value of a single metric; otherwise a dict of values by name. The same on all ranks.
        """
        self._leave()
        run, world = self._run, self._run.world
        state, phase = run.state, world.heartbeat.phase
        task = LoopEvaluation(self._task, metrics, predict or self.model)
        if id(data) not in self._evaluated:
            loader = from_loader(data, ordered=False)
            if loader.collate is not None:
                task.collate = loader.collate  # type: ignore[method-assign, assignment]
            at_once = memory_shortage.fitting(run.folder, run.config, world).evaluation
            found = run_data.evaluation_data(run.config, task, world, loader.data, micro_batch=at_once)
            self._evaluated[id(data)] = (data, found)  # with `data`: no other object gets its id
        evaluated = self._evaluated[id(data)][1]
        world.heartbeat.enter(Phase.EVALUATING)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._assembled.parts.window.excluded())
            state.strategy.begin_step()
            forward = stack.enter_context(state.strategy.inference())
            stack.enter_context(restored_state(forward, "evaluation"))
            if state.averages is not None:
                stack.enter_context(state.averages.applied())
            results = evaluate.evaluate(
                task, forward, evaluated.loader, plan=evaluated.plan, world=world, precision=state.precision
            )
        world.heartbeat.enter(Phase(phase))
        self._assembled.consensus.restart()
        values = {name: value for name, value in results.items() if name not in ("samples", "bad")}
        return values if isinstance(metrics, Mapping | Sequence) or len(values) != 1 else next(iter(values.values()))

    def save(self, path: str | Path, module: nn.Module | None = None, *, if_best: float | None = None) -> bool:
        """Write the whole weights as `torch.save(model.state_dict(), path)` does. All ranks call it.

        Args:
            path: of the file.
            module: a part of the model. None: the whole model.
            if_best: write the file only if this value is above those of all earlier calls for this file, before a
                restart, too. For a loss, give `-loss`. The value of rank 0 counts.

        Returns:
            whether the file was written.
        """
        self._leave()
        run = self._run
        if if_best is not None and not self._kept.is_best(str(path), float(run.world.broadcast(if_best))):
            return False
        if self._trial is not None:
            path = self._trial.folder / Path(path).name
        with contextlib.ExitStack() as stack:
            if run.state.averages is not None:
                stack.enter_context(run.state.averages.applied())
            held = (module or run.model).state_dict()
            whole = {
                name: gather_on_rank0(value, run.world) if isinstance(value, torch.Tensor) else value
                for name, value in held.items()
            }

            run.world.on_rank0(partial(write_weights, whole, Path(path)))
        return True

    def close(self) -> None:
        """Leave the other ranks. The end of the process, and another `Loop`, do so too."""
        self._exit.close()
