"""The content of a run's checkpoint, and how a run resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.core import optimizer_class, run_folder
from lockstep.core.build import Run
from lockstep.core.checkpoint import files, finite, store
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig, config_digest
from lockstep.core.ema import Ema
from lockstep.core.errors import UsageError, listed, number_of
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.loop import Keeper
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.stop_consensus import StopConsensus
from lockstep.core.parallel.world import World
from lockstep.core.schedule import set_lr
from lockstep.core.step import TrainState

SCHEDULE_LENGTH_KEYS = ("train.steps", "train.epochs", "train.min_steps", "schedule.total_steps")
"""Keys that change the length of the schedule's curve."""


def restore(checkpoint: Checkpoint, run: Run, allow_change: Sequence[str]) -> list[str]:
    """Load a checkpoint into a run.

    Args:
        allow_change: keys of the config (or `data`) that may differ from the run's.

    Returns:
        messages for the log.

    Raises:
        UsageError: another run saved the checkpoint, or the data or the schedule are not the run's and `allow_change`
            does not name them.
        CheckpointError: the checkpoint does not fit the model, or is damaged.
    """
    manifest, config, state, model = checkpoint.manifest, run.config, run.state, run.model
    node = state.world.node_group
    state.world.on_rank0(partial(_check_run, checkpoint, run.folder))
    store.read_contents(checkpoint, node)
    _check_data(checkpoint, run.fingerprint, allow_change)
    messages = _check_schedule(config, state, manifest, allow_change)
    messages += _check_passes(run, manifest, allow_change)
    has_averages = any(name.startswith("ema.") for name in checkpoint.index)
    averages = state.averages.tensors if state.averages and has_averages else None
    messages += checkpoint_state.check_fits(checkpoint.index, model, averages, checkpoint.values)
    _check_code(manifest, state.optimizer, allow_change)
    optimizer = state.optimizer if manifest["optimizer"] == _kind_of_optimizer(config, state.optimizer) else None
    if optimizer is None:
        messages.append(f"the state of {manifest['optimizer'][0]} is left out: the run has a different optimizer now")
    needed = checkpoint_state.wanted(checkpoint.index, model, optimizer, averages)
    tensors = files.read(checkpoint.path, checkpoint.index, needed, node)
    checkpoint_state.restore(tensors, checkpoint.values, model, optimizer, averages, state.world.device)
    if state.averages and averages is None:
        state.averages = Ema(model, config.train.ema_decay or 0.0)
        messages.append("averages begin with the weights of this step")
    state.precision.load(manifest["loss_scale"])
    state.step, state.skipped = checkpoint.step, manifest["skipped"]
    stopping = run.stopping
    if stopping.history is not None:
        of = manifest["evaluations_of"]
        messages += stopping.history.restore(manifest["evaluations"], of, "train.stop_when")
    if state.schedule.history is not None and "plateau" in manifest:
        metric, results = manifest["plateau"]
        messages += state.schedule.history.restore(results, metric, "schedule.plateau")
    stopping.earlier_s = manifest["trained_s"]
    if checkpoint.metrics:
        stopping.add(state.step, checkpoint.metrics)
        state.schedule.add(state.step, checkpoint.metrics)
    if state.step > state.skipped:  # the rate of the last update, which is logged if no other update follows
        set_lr(state.optimizer, state.schedule(state.step - state.skipped - 1))
    return messages


def _check_run(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises UsageError if another run saved the checkpoint. Runs of earlier versions do not record what is compared.

    environment.json has the digest of each config that the run has trained with, so also those that `--allow-change`
    has replaced since.
    """
    recorded, manifest = run_folder.recorded(folder), checkpoint.manifest
    run, saved_by = recorded.get("run"), manifest.get("run")
    if run and saved_by and run != saved_by:
        difference = f"its run id is {saved_by}, and that of the run directory is {run}"
    elif manifest["config"] not in recorded.get("configs", [manifest["config"]]):
        difference = f"config {manifest['config'][:12]} trained it, and the run directory records no such config"
    else:
        return
    raise UsageError(
        f"another run saved the checkpoint of step {checkpoint.step}: {difference}",
        where=str(checkpoint.path),
        remedy="move the checkpoints of the other run out of this folder, or start again with --fresh. To begin with "
        "the weights of a checkpoint: train.init_from=PATH in a different --run-dir",
    )


def _check_data(checkpoint: Checkpoint, fingerprint: dict[str, Any], allow_change: Sequence[str]) -> None:
    saved = checkpoint.manifest["data"]
    now = {"order": None, **fingerprint}
    changed = [name for name, value in {"order": None, **saved}.items() if now.get(name, value) != value]
    if not changed or "data" in allow_change:
        return
    words = {
        "samples": f"{number_of(saved['samples'], 'sample')} then, {fingerprint['samples']} now",
        "digest": "samples differ",
        "order": "they are drawn in a different order, such as by different weights",
    }
    change = "; ".join(words.get(name) or f"{name}: {saved[name]} then, {fingerprint[name]} now" for name in changed)
    raise UsageError(
        f"the training data are not those that the run began with: {change}",
        where=str(checkpoint.path),
        remedy="give the same data, --allow-change data to continue with these, or --fresh to start again",
    )


def _check_schedule(
    config: RunConfig, state: TrainState, manifest: Mapping[str, Any], allow_change: Sequence[str]
) -> list[str]:
    """Compare the length of the schedule's curve with the length that a checkpoint was trained with.

    A warm-up that is a share of the length stays as long as it was when the run began.

    Returns:
        a warning, if the lengths differ and `allow_change` allows it.

    Raises:
        UsageError: on the config's curve, the updates so far would have had other learning rates.
    """
    share, warmup = manifest["schedule_warmup"]
    kept = {"total_steps": manifest["schedule_steps"], "warmup_share": share, "kept_warmup": warmup}
    then = state.schedule.model_copy(update=kept)
    done = manifest["step"] - manifest["skipped"]
    factor = manifest.get("schedule_own")
    if factor is not None and state.schedule.own is not None and factor != state.schedule(done - 1):
        changed = f"its factor for update {done - 1} was {factor:g}, and is {state.schedule(done - 1):g} now"
        if "schedule" in allow_change:
            return [f"warning: the schedule's function has changed: {changed}"]
        remedy = "restore the function, --allow-change schedule to continue with this one, or --fresh to start again"
        raise UsageError(f"the schedule's function has changed: {changed}", where="schedule", remedy=remedy)
    now = state.schedule = state.schedule.with_warmup_of(then)
    if now.same_until(then, done):
        return []
    train = config.train
    key, value = ("train.steps", train.steps) if train.steps else ("train.epochs", train.epochs or 1)
    if config.schedule.total_steps:
        key, value = "schedule.total_steps", config.schedule.total_steps
    group = state.optimizer.param_groups[0]
    before, after = (f"{group['base_lr'] * factor:.4g}" for factor in (then(done - 1), now(done)))
    text = f"the {now.name} schedule had {number_of(then.length, 'step')} and has {now.length} now"
    text += f": after {number_of(done, 'update')} the learning rate goes from {before} to {after}"
    if any(f"{name}.".startswith(f"{allowed}.") for name in SCHEDULE_LENGTH_KEYS for allowed in allow_change):
        return [f"warning: {text}"]
    raise UsageError(
        text,
        where=f"{key}={value}",
        remedy=f"schedule.total_steps={then.length} keeps the curve, and the last rate after its end; "
        f"--allow-change {key} continues with the new curve; --fresh deletes the run and starts again",
    )


def _passes(run: Run) -> list[int]:
    """The forward passes of a step on each rank, for each size of `batch.micro`."""
    return [run.plan.count(epoch * run.plan.steps_per_epoch) for epoch in run.plan.micro_by_epoch or (0,)]


def _check_passes(run: Run, manifest: Mapping[str, Any], allow_change: Sequence[str]) -> list[str]:
    """Compare the number of forward passes in a step with that of a checkpoint, if the passes move parameters.

    Returns:
        a warning, if the numbers differ and `allow_change` allows it.

    Raises:
        UsageError: the numbers differ: a different model would be trained.
    """
    then, now = manifest.get("passes"), _passes(run)
    run.moves_in_passes = manifest.get("moves_in_passes", [])
    if then is None or then == now:
        return []
    names = listed(run.moves_in_passes)
    before, after = (" or ".join(map(str, sorted(set(counts)))) for counts in (then, now))
    text = f"each forward pass changes {names}, and a step had {before} passes on each rank and has {after} now"
    if any("batch.micro.".startswith(f"{allowed}.") for allowed in allow_change):
        return [f"warning: {text}"]
    raise UsageError(
        f"{text}, which would train a different model",
        where="batch.micro",
        remedy="choose batch.micro and the number of ranks so that a step has as many passes as before; after a lack "
        "of memory, take more ranks or compute.activation_checkpointing=true, and delete micro.json in the run "
        "directory; or --allow-change batch.micro to continue with a different number",
    )


def may_be_infinite(run: Run) -> finite.Grades:
    """The tensors that are not finite at the start: checkpoints may hold them. A collective."""
    tensors, _ = _captured(run)
    return finite.at_start(run.model, tensors, run.world)


def _captured(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a run: its tensors, and its other values."""
    averages = run.state.averages.tensors if run.state.averages else None
    return checkpoint_state.capture(run.model, run.state.optimizer, averages)


class RunKeeper(Keeper):
    """Keeps the states of a run as checkpoints.

    Args:
        consensus: knows the seconds since this start of the training, the same number on all ranks.
    """

    def __init__(self, run: Run, saver: Saver, parts: JoinedParts, consensus: StopConsensus) -> None:
        self.run, self.saver, self.parts, self.consensus = run, saver, parts, consensus

    def save(self, results: dict[str, float]) -> None:
        state = self.run.state
        phase = state.world.heartbeat.phase
        state.world.heartbeat.enter(Phase.SAVING)
        tensors, values = _captured(self.run)
        manifest = _manifest(self.run, results)
        manifest["trained_s"] = self.run.stopping.earlier_s + self.consensus.elapsed_s
        if joined := self.parts.saved():
            manifest["parts"] = joined
        if log := self.parts.window.saved():
            manifest["log"] = log
        self.saver.save(state.step, tensors, values, manifest)
        state.world.heartbeat.enter(Phase(phase))

    def add_metrics(self, results: dict[str, float]) -> None:
        self.saver.add_metrics(self.run.state.step, results, self.parts.saved())

    def check_place(self) -> None:
        self.saver.check_place()

    def kept(self) -> str:
        return self.saver.kept()

    def finish(self) -> None:
        self.saver.finish()


def _manifest(run: Run, evaluated: dict[str, float]) -> dict[str, Any]:
    state, schedule = run.state, run.state.schedule
    updates = state.step - state.skipped
    return {
        "step": state.step,
        "skipped": state.skipped,
        "loss_scale": state.precision.state(),
        "metrics": evaluated,
        "data": run.fingerprint,
        "optimizer": _kind_of_optimizer(run.config, state.optimizer),
        **({"optimizer_code": code} if (code := optimizer_class.code_of(state.optimizer)) else {}),
        "config": config_digest(run.config),
        "run": run.id,
        "versions": {"lockstep": lockstep.__version__, "torch": torch.__version__, "world": state.world.size},
        "schedule_steps": state.schedule.length,
        "schedule_warmup": [state.schedule.warmup_share, state.schedule.warmup],
        **({"schedule_own": schedule(updates - 1)} if schedule.own is not None and updates else {}),
        **({"plateau": [schedule.history.metric, schedule.history.results]} if schedule.history else {}),
        "warnings": run.warnings,
        **({"checked_step": run.checked_step, "checks": run.checks} if run.checked_step is not None else {}),
        **({"passes": _passes(run), "moves_in_passes": run.moves_in_passes} if run.moves_in_passes else {}),
        "evaluations": run.stopping.history.results if run.stopping.history else [],
        "evaluations_of": run.stopping.rule.metric if run.stopping.rule else None,
    }


def _check_code(manifest: Mapping[str, Any], optimizer: torch.optim.Optimizer, allow_change: Sequence[str]) -> None:
    """Raises UsageError if the class of an optimizer has a different source than when the checkpoint was saved."""
    then, now = manifest.get("optimizer_code", {}), optimizer_class.code_of(optimizer)
    changed = [name for name in then.keys() & now.keys() if then[name] != now[name]]
    if changed and not any(key.partition(".")[0] == "optim" for key in allow_change):
        raise UsageError(
            f"the source of {min(changed)} has changed since the run began",
            where="optim.name",
            remedy="restore the file, --allow-change optim to continue with this class, or --fresh to start again",
        )


def _kind_of_optimizer(config: RunConfig, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The facts that decide the form of the optimizer's state: its classes and their arguments."""
    own = [[group.name, group.optimizer, group.args] for group in config.optim.groups if group.optimizer]
    kind = [optimizer_class.classes(optimizer), config.optim.args, *([own] if own else [])]
    return list(json.loads(json.dumps(kind, sort_keys=True)))


def load_trained_weights(checkpoint: Checkpoint, model: nn.Module, world: World) -> None:
    """Load a checkpoint's weights: their moving average, if the run kept an average. All ranks call it."""
    node = world.node_group
    store.read_contents(checkpoint, node)
    checkpoint_state.check_fits(checkpoint.index, model, values=checkpoint.values)
    averages = dict(model.named_parameters())
    needed = checkpoint_state.wanted(checkpoint.index, model, averages=averages)
    for kind in ("model.", "ema."):
        part = {name: rows for name, rows in needed.items() if name.startswith(kind)}
        tensors = files.read(checkpoint.path, checkpoint.index, part, node)
        checkpoint_state.restore(tensors, checkpoint.values, model, averages=averages, device=world.device)
