"""Observes optimizers: their parameters, steps, and gradient scaling."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from lockstep_audit.observe import (
    calls,
    data,
    digests,
    final_states,
    models,
    module_creation,
    passes,
    places,
    schedules,
)
from lockstep_audit.observe.communication import note_groups
from lockstep_audit.observe.gradients import gradient_norm, gradients
from lockstep_audit.observe.mixed_passes import mixed_passes, parameters_of
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder
from lockstep_audit.observe.torch_state import has_other_ranks

_MOST = 256
_LOOKS = 4
"""The number of steps after something unusual that are examined."""
_UNFROZEN_EVERY = 10
_LOOPS = 12
_LOW, _MOST_LOW, _NUMBERS = (torch.bfloat16, torch.float16), 16, 65_536


@dataclasses.dataclass
class Optimizer:
    """What is known about an optimizer."""

    number: int
    made_at: list[str | int] | None
    index: int = 0
    """Its steps."""
    backwards_seen: int = 0
    hyperparameters: list[dict[str, Any]] | None = None
    unscaled_at: int | None = None
    """The number of clips before a scaler unscaled its gradients; None: not since the last step."""
    scaler: dict[str, Any] | None = None
    owners: dict[int, None] | None = None
    """Numbers of the models whose parameters it has."""
    is_told: bool = False
    is_prepared: bool = False
    """Whether Accelerate prepared it."""
    looks: int = _LOOKS
    """The number of steps without an exchange of gradients that are still examined."""
    looks_now: int = 0
    """The number of coming steps that are examined, because parameters were unfrozen."""
    loops: int = 0
    """The number of loops over loaders that had begun at its last step."""
    was_cleared: bool | None = None
    """Whether a backward pass since its last step began without gradients. None: not examined."""


@dataclasses.dataclass
class OptimizerStep:
    """A step that is running."""

    optimizer: Any
    known: Optimizer
    at: list[str | int] | None
    frame: Any
    is_sampled: bool
    told: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_ready: bool = False
    before: dict[str, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Parameters of 16 bits, and their values before the step."""


_optimizers: Registry[Optimizer] = Registry()
_count = 0
_steps: list[OptimizerStep] = []
_known_parameters: set[int] = set()
_finished: dict[int, int] = {}


def note_cleared() -> None:
    """Before a backward pass: record which optimizers' gradients were cleared."""
    for optimizer, known in _optimizers.items():
        if known.index and not known.was_cleared:
            known.was_cleared = _is_cleared(optimizer)


def _is_cleared(optimizer: Any) -> bool:
    """True if there are no gradients, or only zeros: checks the first parameters that have one."""
    found = [p.grad for p in parameters_of(optimizer) if p.grad is not None][:2]
    return not any(bool(digests.local(grad).detach().count_nonzero()) for grad in found if grad.layout == torch.strided)


passes.at_sampled.append(note_cleared)
passes.at_first.append(lambda: mixed_passes.begins([each for each, _ in _optimizers.items()], _is_cleared))


def optimizer_made(optimizer: Any, *_: Any, **__: Any) -> After:
    """Optimizer.__init__."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None:
            _note_parameters(optimizer, _know(optimizer, at))

    return after


def _know(optimizer: Any, at: list[str | int] | None = None) -> Optimizer:
    global _count
    known = _optimizers.get(optimizer)
    if known is None:
        known = _optimizers.put(optimizer, Optimizer(_count, at, backwards_seen=recorder.counts.backwards))
        _count += 1
    return known


def _note_parameters(optimizer: Any, known: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        _known_parameters.add(id(parameter))
        gradients.all.put(parameter, None)
        owner = models.owner(parameter)
        if owner is None or not owner[0].how.startswith("fsdp"):
            gradients.parameters.put(parameter, None)


def step_begins(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A hook on all optimizers."""
    if recorder.folder is not None and not torch.compiler.is_compiling():
        return recorder.guard("optimizer step", _begin, optimizer, arguments, named)
    return None


def _begin(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    frame = sys._getframe(3)
    while _steps and not _runs(_steps[-1].frame, frame):  # it raised an error
        _steps.pop()
    if not _steps and not _fresh() and places.is_by_lockstep(frame):  # a trial of the engine, which trains nothing
        return None
    known = _know(optimizer)
    at = places.here(frame)
    is_alone = _is_alone() if known.looks else False
    is_sampled = recorder.is_sampled(known.index) or is_alone or known.looks_now > 0
    is_sampled |= known.loops < recorder.counts.loops <= _LOOPS  # something else may have changed parameters
    step = OptimizerStep(optimizer, known, at, frame, is_sampled)
    known.loops = recorder.counts.loops
    known.looks, known.looks_now = known.looks - is_alone, max(0, known.looks_now - 1)
    _steps.append(step)
    if len(_steps) > 1:  # a step within a step of an optimizer that holds another
        return None
    closure = named.get("closure") or (arguments[1] if len(arguments) > 1 else None)
    if not callable(closure):
        _ready(step)
        recorder.is_stepping = True
        return None

    def observed() -> Any:
        recorder.is_stepping = False
        result = closure()
        recorder.guard("gradients of a closure", _ready, step)
        recorder.is_stepping = True
        return result

    if "closure" in named:
        return arguments, {**named, "closure": observed}
    return (arguments[0], observed, *arguments[2:]), named


def _held() -> set[int]:
    """The ids of all parameters that optimizers currently have."""
    return {id(parameter) for optimizer, _ in _optimizers.items() for parameter in parameters_of(optimizer)}


def _fresh() -> list[dict[str, Any]]:
    """The backward passes since the last step of any optimizer."""
    return passes.backwards[max(0, passes.state.last_seen - passes.state.first) :]


def _is_alone() -> bool:
    """True if none of these passes exchanged gradients of a DDP model."""
    told = [each for backward in _fresh() for each in backward["models"].values()]
    return bool(told) and not any(each["synced"] for each in told)


def prepared(wrapper: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    """AcceleratedOptimizer.__init__."""
    _know(optimizer).is_prepared = True


def _runs(frame: Any, inner: Any) -> bool:
    """True if a frame is on the stack of another."""
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is frame


def _ready(step: OptimizerStep) -> None:
    """The gradients are ready, and the optimizer will use them."""
    if step.is_ready:
        return
    step.is_ready = True
    if not step.known.is_told:
        step.known.is_told = True
        if recorder.rank is None and recorder.is_main:  # one process, without a process group
            recorder.adopt(0)
        _tell_optimizer(step)
    parameters = parameters_of(step.optimizer)
    if step.is_sampled and any(told.get("discarded") for told in passes.backwards):
        step.told["rewritten"] = gradients.is_rewritten(parameters) or None
    if gradients.copies and (unused_at := recorder.guard("copies", gradients.take_copies, parameters)):
        recorder.emit("copy_reduce", limit=4, at=unused_at, optimizer=step.known.number)
    for line in gradients.take(parameters):
        owner = next((owner for owner in map(models.owner, parameters) if owner), None)
        is_clean = not passes.clips and step.known.scaler is None
        line["divided"] = line.get("divided") if is_clean or line.get("divided") else None
        model = owner[0].number if owner else None
        recorder.emit("hand_reduce", limit=4, model=model, optimizer=step.known.number, **line)
    if step.is_sampled:
        low = [each for each in _named(step.optimizer) if each[1].dtype in _LOW and each[1].grad is not None]
        step.before = {n: (one, digests.local(one).detach().flatten()[:_NUMBERS].clone()) for n, one in low[:_MOST_LOW]}
        gradients.note_rescaled()
        step.told["rescaled"] = gradients.rescaled
        scaled_at = None if passes.clips else gradients.scaled_at
        step.told |= _digests(step.optimizer, "gradients") | {"norm_at": gradients.norm_at or scaled_at}
        step.told["gradient_norm"] = gradient_norm(parameters)
        step.told |= {"scaling": gradients.scaling(parameters), "was_cleared": step.known.was_cleared}
    step.known.was_cleared = None


def _rounded(parameter: torch.Tensor, before: torch.Tensor) -> list[int]:
    """How many values of a parameter had a gradient, and how many of these a step left as they were."""
    pair = (parameter, parameter if parameter.grad is None else parameter.grad)
    now, grad = (digests.local(each).detach().flatten()[:_NUMBERS] for each in pair)
    return [int((grad != 0).sum()), int(((grad != 0) & (now == before)).sum())]


def _digests(optimizer: Any, what: str) -> dict[str, Any]:
    """Digests of gradients or parameters that should be equal on all ranks. Shards are left out."""
    tensors: dict[str, torch.Tensor | None] = {}
    numbers: dict[int, None] = {}
    if not has_other_ranks():
        return {}
    for name, parameter in _named(optimizer):
        owner = models.owner(parameter)
        if (owner and owner[0].how.startswith("fsdp")) or hasattr(parameter, "_local_tensor"):
            continue
        if owner:
            numbers[owner[0].number] = None
            name = owner[1] if next(iter(numbers)) == owner[0].number else f"{owner[0].number}:{owner[1]}"
        tensors[name] = parameter.grad if what == "gradients" else parameter
    return {"model": next(iter(numbers), None), what: digests.of_tensors(tensors)} if tensors else {}


def _unwrapped(optimizer: Any) -> list[str] | None:
    """The names that steps use for parameters of no wrapped model."""
    found = [name for name, parameter in _named(optimizer) if models.owner(parameter) is None]
    return found[:_MOST] or None


def _named(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{number}.{place}" for place in range(len(group["params"]))]
        found += zip(names, group["params"], strict=True)
    return found


def _tell_optimizer(step: OptimizerStep) -> None:
    note_groups()
    for model in models.told():
        models.refresh(model)
    _note_parameters(step.optimizer, step.known)
    parameters = parameters_of(step.optimizer)
    owners = [models.owner(parameter) for parameter in parameters]
    event: dict[str, Any] = {"at": step.at, "optimizer": step.known.number, "class": type(step.optimizer).__name__}
    event |= {"made_at": step.known.made_at}
    event |= {"groups": [{"parameters": len(g["params"]), **_hyperparameters(g)} for g in step.optimizer.param_groups]}
    event |= {"owned": sum(owner is not None for owner in owners), "foreign": sum(owner is None for owner in owners)}
    event |= {"missing": models.missing(_known_parameters), "left_out": models.left_out(_known_parameters)}
    event |= {"untrained": module_creation.untrained(_known_parameters | _held(), models.inner_of_told())}
    event |= {"unwrapped": _unwrapped(step.optimizer) if any(owners) else None}
    bare = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner is None]
    owned = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner is not None]
    event |= {"unwrapped_from": module_creation.made_from(bare)}
    if module_creation.holds(bare, owned):
        event["partly_at"] = next(owner[0].at for owner in reversed(owners) if owner)
    event |= {"initial": _digests(step.optimizer, "parameters").get("parameters") if bare else None}
    event |= {"constant": [n for n, p in _named(step.optimizer) if digests.is_constant(p)] if bare else None}
    event |= {"prepared": step.known.is_prepared or None}
    event |= {"gradients_none": sum(parameter.grad is None for parameter in parameters)}
    recorder.emit("optimizer", limit=100, **event)
    if recorder.counts.optimizer_steps == 0 and parameters:
        device = parameters[0].device
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        recorder.emit("device", device=str(device), uuid=uuid)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = float(value)
        if isinstance(value, (bool, int, float, str)) or (isinstance(value, tuple) and len(value) < 5):
            kept[name] = value
    return kept


def step_ends(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A hook on all optimizers."""
    recorder.is_stepping = False
    if recorder.folder is not None and _steps and _steps[-1].optimizer is optimizer:
        step = _steps.pop()
        if not _steps:
            recorder.guard("optimizer step", _end, step)


def _end(step: OptimizerStep) -> None:
    if not step.is_ready:  # a closure that was never called
        _ready(step)
    step.told["mixed"] = recorder.guard("passes of several optimizers", mixed_passes.stepped, step.optimizer, step.at)
    _write_step(step)
    step.known.index += 1
    _finished[step.known.number] = step.known.index
    recorder.counts.optimizer_steps += 1
    recorder.progress()
    calls.after_step()
    schedules.after_step(step.optimizer)


def _write_step(step: OptimizerStep, skipped: bool | None = None) -> None:
    known, optimizer = step.known, step.optimizer
    if known.owners is None or step.is_sampled:
        known.owners = dict.fromkeys(owner[0].number for owner in map(models.owner, parameters_of(optimizer)) if owner)
    owners = known.owners
    if step.is_sampled and skipped is None:
        step.told |= _digests(optimizer, "parameters")
        step.told["rounded"] = {name: _rounded(*each) for name, each in step.before.items()} or None
    if step.is_sampled or known.index % _UNFROZEN_EVERY == 0:
        for model in models.told():
            if model.number in owners and model.how == "ddp" and final_states.note_unfrozen(model, step.at, _held):
                known.looks_now = _LOOKS
    fresh = _fresh()
    own = passes.backwards[max(0, known.backwards_seen - passes.state.first) :]
    backwards = [_told_backward(told, owners) for told in fresh or own]
    if any(told.pop("is_past") for told in backwards):
        calls.watch_forwards()
    if backwards and all(told.get("forwards") == 0 for told in backwards):
        calls.watch_reads()
    hyperparameters = [_hyperparameters(group) for group in optimizer.param_groups]
    clips = [{**told, "backwards_before": _since(known, told)} for _, told in passes.clips]
    scaler = known.scaler
    if scaler is not None and passes.clips:
        scaler["unscaled_before_clip"] = known.unscaled_at is not None and known.unscaled_at < passes.clips[0][0]
    event: dict[str, Any] = {"at": step.at, "optimizer": known.number, "index": known.index, "backwards": backwards}
    event |= {"micro_batches": [told for _, told in data.given] or None}
    event |= {"hyperparameters": hyperparameters if hyperparameters != known.hyperparameters else None}
    event |= {"clips": clips or None, "scaler": scaler, "skipped": skipped, "sampled": step.is_sampled, **step.told}
    recorder.emit("step", **event)
    known.hyperparameters, known.scaler, known.unscaled_at = hyperparameters, None, None
    known.backwards_seen = recorder.counts.backwards
    data.given.clear()
    passes.clips.clear()
    seen = min(other.backwards_seen for _, other in _optimizers.items())
    del passes.backwards[: max(0, seen - passes.state.first)]
    _note_seen(max(seen, passes.state.first), recorder.counts.backwards)


def _note_seen(first: int, last: int) -> None:
    passes.state.first, passes.state.last_seen = first, last


def _since(known: Optimizer, told: dict[str, Any]) -> int:
    return max(0, int(told["backwards_before"]) - known.backwards_seen)


def _told_backward(told: dict[str, Any], owners: dict[int, None]) -> dict[str, Any]:
    """A backward pass in the form of a step event: for the models whose parameters the optimizer has."""
    kept = {key: value for key, value in told.items() if key != "models" and value is not None}
    mine = [each for number, each in told["models"].items() if number in owners]
    kept["is_past"] = any(not each["pending"] for each in mine)
    kept |= next(({"evaluating": each["evaluating"]} for each in mine if each["evaluating"]), {})
    if any(each["unsynced_at"] and not each["synced"] for each in mine):
        kept["unsynced_at"], kept["unsynced_by_user"] = next(e["unsynced_at"] for e in mine if e["unsynced_at"])
    if mine:
        kept["synced"] = any(each["synced"] for each in mine)
        kept["flag_set_late"] = any(each["flag_set_late"] for each in mine)
        kept["forwards"] = sum(each["pending"] for each in mine)
    return kept


def scaler_unscales(scaler: Any, optimizer: Any) -> After:
    """GradScaler.unscale_."""
    if scaler._enabled:
        _know(optimizer).unscaled_at = passes.state.clips_called
    return None


def scaler_steps(scaler: Any, optimizer: Any, *_: Any, **__: Any) -> After:
    """GradScaler.step: records a step that the scaler skips."""
    if not scaler._enabled:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    known, at = _know(inner), places.here()
    index, unscaled_at = known.index, known.unscaled_at
    is_sampled = recorder.is_sampled(index)
    scale = float(scaler._scale) if is_sampled and scaler._scale is not None else None
    known.scaler = {"scale": scale, "found_inf": False, "enabled": True}

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and known.index == index:
            known.unscaled_at = unscaled_at
            known.scaler = {"scale": scale, "found_inf": True, "enabled": True}
            _write_step(OptimizerStep(inner, known, at, None, is_sampled), skipped=True)

    return after


def at_exit() -> dict[str, Any]:
    """What came after the last optimizer step."""
    left = recorder.counts.backwards - passes.state.last_seen
    return {"backwards_left": left or None, "steps": dict(_finished) or None}
