"""The one place where a training is put together: `assemble` makes a run of a config, a task and the ranks.

`Trainer.fit` and `Loop` use it. `in_memory` makes the same training without files.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.configs import registry
from lockstep.configs.task_options import TaskOptions
from lockstep.core import atomic, build, devices, joined_parts, loop, resume, run_data, run_model, training_run
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.checkpoint import room, store
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig, all_values
from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.devices import backends
from lockstep.core.errors import UsageError, exits_are_failures
from lockstep.core.evaluation_run import Viewer
from lockstep.core.held_folder import HeldFolder
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.precision import check_supported
from lockstep.core.parallel.signals import StopFlag
from lockstep.core.parallel.stop_consensus import StopConsensus
from lockstep.core.parallel.world import World, join_world
from lockstep.core.part import Part, label
from lockstep.core.step import StepResult, driven
from lockstep.core.task import Task, methods_not_called
from lockstep.launch import watchdog
from lockstep.launch.preflight import run as preflight
from lockstep.launch.preflight.facts import Subject, spans_machines
from lockstep.lora import frozen
from lockstep.mesh.layout import laid_out
from lockstep.parts import built_in, determinism, ending
from lockstep.parts import profile as profiling
from lockstep.parts.checks.run_checks import RunChecks
from lockstep.parts.writer_kinds import files_of_writers
from lockstep.sampling import of_data
from lockstep.streams import stream
from lockstep.trainer import foreign, joining, memory_shortage, run_directory, run_record, source_code
from lockstep.trainer.joining import Entries, Recorder
from lockstep.updates.arrange import arrange
from lockstep.watch import evidence
from lockstep.watch.part import Watch
from lockstep.weights.init_from import InitFrom


@dataclass(frozen=True)
class Setup:
    """What a training is made of, besides its task and its ranks. For the fields, see `Trainer`."""

    config: RunConfig
    run_dir: Path
    fresh: bool = False
    allow_change: Sequence[str] = ()
    quiet: bool = False
    profile: profiling.ProfileWindow | None = None
    parts: Sequence[Part] = ()
    by_loop: bool = False
    """True if a `Loop` asks; see `Run.by_loop`."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def kept(self) -> Path:
        """The folder of the files that the task keeps with the run."""
        return self.run_dir / "task"


@dataclass
class Assembled:
    """A training on this rank that is ready to begin, with all that joins it."""

    setup: Setup
    """The setup with the config from the run directory."""
    run: Run
    parts: joined_parts.JoinedParts
    viewers: list[Viewer]
    consensus: StopConsensus
    """Its clock is that of the training."""

    def train(self) -> dict[str, float]:
        """Train to the end, each step by the update of the run.

        Returns:
            the last logged value of each name. Empty if the run was complete already.
        """
        return driven(self.steps(), lambda asked: asked.made_by(self.run.update, self.run.state))

    def steps(self) -> Generator[loop.NextStep, StepResult, dict[str, float]]:
        """The steps of the training; see `core.loop.steps`."""
        results = yield from training_run.steps(
            self.run, parts=self.parts, viewers=self.viewers, consensus=self.consensus
        )
        if self.run.held is not None:
            ending.tell(self.run, results, self.consensus.elapsed_s)
        return results

    @property
    def trained(self) -> nn.Module | None:
        """The model as evaluations use it, when all is saved: averages take the place of the weights.

        None: this rank holds only shards.
        """
        state, model = self.run.state, self.run.model
        if state.strategy.is_sharded:
            return None
        if state.averages is not None:
            with torch.no_grad():
                for name, average in state.averages.tensors.items():
                    model.get_parameter(name).copy_(average)
        model.zero_grad(set_to_none=True)
        return model.eval()


@contextlib.contextmanager
def assemble(
    setup: Setup, task: Task | None, world: World, *, flag: StopFlag, recorder: Recorder | None = None
) -> Iterator[Assembled]:
    """Put a training together, with the newest checkpoint of the run directory, and check all that can be checked.

    All ranks call it. The run directory, the writers of the log and the loaders are released at the end.

    Args:
        task: None: the task of the config.
        flag: says whether a signal asked to stop.
        recorder: records the training.

    Raises:
        LockstepError: the config, the data, the model or the machines cannot be used; names all faults.
    """
    if task is None and foreign.is_in_file(setup.config):
        task = make_task(setup.config)
    setup = replace(setup, config=foreign.settle(setup.config, task, world))
    findings = preflight.check(subject(setup, task, world), world)
    preflight.raise_faults(findings)
    with (
        run_directory.claim(
            setup.run_dir, setup.config, world, setup.fresh, setup.allow_change, written_by=files_of_writers
        ) as config,
        HeldFolder(setup.run_dir) as held,
    ):
        setup = replace(setup, config=config)
        own_parts = [*joining.make_parts(config.train.parts), *setup.parts, *foreign.parts(task)]
        joined_parts.check(own_parts)
        task = foreign.configured(task, config) or make_task(config)
        messages = run_record.check_source(setup.run_dir, task, config, world, setup.allow_change)
        run = prepare(setup, task, world)
        run.held = held
        run.messages += [*preflight.lines(findings), *messages, *foreign.notes(task)]
        git = run_record.git_commit(config, world)
        with joining.opened(run, git, quiet=setup.quiet), memory_shortage.noted(setup.run_dir, config, world, run.plan):
            recorders = [recorder] if recorder is not None else []
            for one in recorders:
                run.writers.append(Entries(one))
                one.join(run)
            checks = RunChecks(run)
            at_once = memory_shortage.fitting(setup.run_dir, config, world).evaluation
            training_run.open_evaluations(run, evaluated_tasks(setup, task, world), at_once)
            profiler = [profiling.Profiler(setup.profile, run)] if setup.profile else []
            ours = [*recorders, checks, *built_in_parts(run, partial(rebuilt, setup, task, world)), *profiler]
            parts = training_run.join_parts(run, ours, [*own_parts, *stream.part_of(run)])
            viewers = built_in.viewers(run)
            training_run.check(run, parts, viewers, more=partial(checks.before_first_step, run.evaluated))
            held.check()
            run_record.keep(run, git)
            consensus = StopConsensus(world, flag)
            with evidence.setting_aside(run), profiler[0] if profiler else contextlib.nullcontext():
                yield Assembled(setup, run, parts, viewers, consensus)


def in_memory(config: RunConfig, task: Task, world: World) -> Assembled:
    """Put a training together that keeps and writes nothing, and makes no checks before its first step.

    Its steps are those of `assemble`.
    """
    config = config.model_copy(update={"batch": config.batch.resolve(world.data_size)})
    setup = Setup(config, Path())
    run = run_at(setup, task, world, None)
    training_run.open_evaluations(run, {"": task}, run_data.evaluated_at_once(config))
    parts = training_run.join_parts(run, built_in_parts(run), stream.part_of(run))
    return Assembled(setup, run, parts, [], StopConsensus(world, StopFlag()))


def built_in_parts(run: Run, rebuild: Callable[[Checkpoint | None], Run] | None = None) -> list[BuiltInPart]:
    """Lockstep's own Parts, as the config asks for them. For `rebuild`, see `Watch`."""
    return [*built_in.parts(run), *([Watch(run, rebuild)] if run.config.watch.every else [])]


def prepare(setup: Setup, task: Task, world: World) -> Run:
    """Make the run on this rank, and load the newest checkpoint, if there is one."""
    checkpoint, complaints = store.newest(setup.checkpoints, world)
    set_up(setup, task, world, trained=checkpoint is not None)
    run = run_at(setup, task, world, checkpoint)
    if checkpoint is not None:
        run.messages += run_record.changed_kind(setup.run_dir, world)
        run.messages += run_record.changed_kernel(setup.run_dir, run.config, run.state.optimizer)
        run.checked_step = evidence.checked_step(setup.run_dir, checkpoint)
        run.checks = checkpoint.manifest.get("checks", 0)
        if world.rank == 0 and not setup.quiet:
            print("\n".join([*complaints, f"resuming {setup.run_dir} at step {run.state.step}"]))
    run.messages += [*methods_not_called(task), *of_data.lines(run.plan), *stream.lines(run)]
    run.messages += [] if setup.config.train.unfreeze else frozen.note(run.model)
    options = getattr(task, "options", None)
    if isinstance(options, TaskOptions):  # with train.steps, the number of epochs depends on the data
        never = options.never_reached(-(-run.stop // run.plan.steps_per_epoch))
        texts = [f"warning: task.{key}: {what}" for key, what in never.items()]
        run.warnings += [text for text in texts if text not in run.warnings]
    if checkpoint is None:
        preflight.check_room(setup.run_dir, room.estimated_bytes(run), world)
    run.may_be_infinite = resume.may_be_infinite(run)
    return run


def run_at(setup: Setup, task: Task, world: World, checkpoint: Checkpoint | None) -> Run:
    """Make the run on this rank, with the state of a checkpoint, or from the beginning."""
    config = setup.config
    run = build.prepare_run(
        config,
        task,
        world,
        micro_batch=memory_shortage.fitting(setup.run_dir, config, world).training,
        checkpoint=checkpoint,
        folder=setup.run_dir,
        beginning=InitFrom(config.train) if config.train.init_from else None,
        order_of=of_data.order_of,
        by_loop=setup.by_loop,
    )
    arrange(run)
    if checkpoint is not None:
        run.messages += resume.restore(checkpoint, run, setup.allow_change)
    return run


def rebuilt(setup: Setup, task: Task, world: World, checkpoint: Checkpoint | None) -> Run:
    """A second copy of the run; see `watch.replay`. This process reads its samples."""
    data = setup.config.data.model_copy(update={"workers": 0})
    setup = replace(setup, config=setup.config.model_copy(update={"data": data}))
    return run_at(setup, copy.copy(task), world, checkpoint)


def subject(setup: Setup, task: Task | None, world: World) -> Subject:
    """What the checks of the machines look at."""
    data = setup.config.data
    sources = {"data.train": data.train}
    sources |= {f"data.eval.{name}" if name else "data.eval": path for name, path in data.eval_sources.items()}
    source = source_code.of_choice(task, setup.config.task.get("kind")) if spans_machines(world.size) else {}
    return Subject(
        config=all_values(setup.config) | {"Trainer(parts=...)": [label(part) for part in setup.parts]},
        source=source_code.digest(source) if source else "",
        folder=setup.run_dir,
        data={key: path for key, path in sources.items() if path},
        stop=setup.config.train.steps,
        fresh=setup.fresh,
    )


# ---- ranks and tasks, which evaluations and predictions need, too


@contextlib.contextmanager
def joined(config: RunConfig, run_dir: Path) -> Iterator[World]:
    """Join the ranks, and set torch up as the config says. All of it is undone at the end."""
    compute = config.compute
    is_deterministic = compute.deterministic or config.parallel.virtual_ranks is not None
    if is_deterministic:
        determinism.prepare()
    with contextlib.ExitStack() as stack:
        timeout_s = config.parallel.timeout_s
        watch = partial(watchdog.watch, timeout_s=timeout_s, folder=run_dir)
        world = laid_out(stack.enter_context(join_world(config.device, timeout_s, watch)), config)
        stack.enter_context(exits_are_failures())
        stack.enter_context(_deterministic(is_deterministic))
        stack.enter_context(equal_bits.one_thread(world))
        check_supported(config.precision, world.device)
        stack.enter_context(backends.chosen(compute.matmul_precision, compute.cudnn_benchmark, compute.sdpa_backends))
        if compute.numa_binding:
            stack.enter_context(devices.of(world.device).near_cpus(compute.numa_binding))
        if compute.memory_snapshot:
            file = run_dir / "memory" / f"rank{world.rank}.pickle"
            stack.enter_context(devices.of(world.device).snapshot_at_shortage(file))
        yield world


@exits_are_failures()
def make_task(config: RunConfig, evaluated: str | None = None) -> Task:
    """A new object of the config's task.

    Args:
        evaluated: the name of its evaluation data, if `data.eval` has several. None: the first.
    """
    run_model.seed_everything(config)
    data = config.data
    sources = data.eval_sources
    held_out = sources[evaluated] if evaluated is not None else next(iter(sources.values()))
    cache = CacheOptions(int(data.cache_gb * 1e9), data.cache_size) if data.cache == "decoded" else None
    train, held_out = (source and os.path.expanduser(source) for source in (data.train, held_out))
    task = registry.build_task(config.task, train, held_out, cache, fold=data.fold)
    return foreign.configured(task, config) or task


def evaluated_tasks(setup: Setup, task: Task, world: World) -> dict[str, Task]:
    """For each set of evaluation data, by its name, the task that has it: `task` itself for the first."""
    first, *others = setup.config.data.eval_sources
    tasks = {first: task}
    for name in others:
        tasks[name] = make_task(setup.config, name)
        set_up(setup, tasks[name], world, trained=True)
    return tasks


def set_up(setup: Setup, task: Task, world: World, *, trained: bool) -> None:
    """Set up the task: rank 0 writes the files that the task keeps with the run, then the other ranks read them."""

    def write() -> None:
        if not trained:  # an earlier start without a checkpoint may have had a different config
            with contextlib.suppress(OSError):
                atomic.remove(setup.kept)
        task.setup(setup.kept, trained)

    world.on_rank0(write)
    if world.rank:
        task.setup(setup.kept, trained)


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Inside, torch uses deterministic kernels only, if `enabled`.

    Raises:
        UsageError: an operation has no such kernel; names it.
    """
    try:
        with determinism.deterministic(enabled):
            yield
    except determinism.NotDeterministic as error:
        raise UsageError(
            str(error),
            where="compute.deterministic=true",
            remedy="use another operation, or compute.deterministic=false: a GPU then repeats and resumes a training "
            "to rounding only",
        ) from error
