"""Observes forward passes of wrapped models and of their modules, through the wrapper and past it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe import buffers, digests, evaluations, models, module_creation, places, wrapper_bypass
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_WATCH_STEPS = 4
_INPUTS = 6


def forward(wrapper: Any, *arguments: Any, **named: Any) -> After:
    """DDP.forward, FSDP.forward, DataParallel.forward."""
    model = models.of(wrapper)
    if model is None:
        return None
    if torch.is_grad_enabled():
        _note_inputs(model, [*arguments, *named.values()])
        model.evaluating = not _is_training(model, wrapper)
        if model.how == "ddp" and not model.evaluating:
            recorder.guard("buffers of layers", buffers.before_forward, model.number, model.inner(), wrapper)
        model.synced = getattr(wrapper, "require_backward_grad_sync", None) if model.how == "ddp" else None
    model.active += 1

    def after(result: Any, error: BaseException | None) -> None:
        model.active -= 1
        if error is None and (model.how != "fsdp1" or wrapper._is_root):
            _count_forward(model, wrapper, [*arguments, *named.values()])

    return after


def _note_inputs(model: models.Model, inputs: list[Any]) -> None:
    """Digests of a model's inputs: at its first call in each of the first steps."""
    steps = recorder.counts.optimizer_steps
    if steps < _INPUTS and steps not in model.inputs:
        model.inputs.add(steps)
        tensors = list(digests.tensors_in(inputs))
        found = digests.of_tensors({str(number): tensor for number, tensor in enumerate(tensors)})
        told: dict[str, Any] = {"digest": digests.of_numbers(found.values())}
        told["elements"] = max((t.numel() for t in tensors), default=0)
        recorder.emit("inputs", at=places.here(), model=model.number, **told)


def forward_of_shards(state: Any, module: Any, *arguments: Any, **__: Any) -> After:
    """FSDPState._pre_forward."""
    model = models.of(module)
    if model is not None and torch.is_grad_enabled():
        _note_inputs(model, list(arguments))

    def after(result: Any, error: BaseException | None) -> None:
        if model is not None and error is None and state._is_root:
            _count_forward(model, module, list(arguments))

    return after


def _count_forward(model: models.Model, wrapper: Any, inputs: list[Any]) -> None:
    if not model.is_told:
        models.tell(model)
    recorder.progress()
    model.pending += torch.is_grad_enabled()
    if torch.is_grad_enabled() and _is_training(model, wrapper):
        recorder.counts.forwards_training += 1
        model.evaluation.train()
    else:
        recorder.counts.forwards_eval += 1
        if not _is_training(model, wrapper):
            _note_evaluation(model, inputs)


def _is_training(model: models.Model, wrapper: Any) -> bool:
    """The mode of the module itself: Lightning restores the module's mode, and not the wrapper's."""
    inner = model.inner()
    return bool((wrapper if inner is None else inner).training)


def _note_evaluation(model: models.Model, inputs: Any) -> None:
    inner = model.inner()
    if model.evaluation.is_due and inner is not None:
        _due.discard(model.number)
        evaluations.begin(model.evaluation, model.how, model.number, inner, inputs)


_due: set[int] = set()
"""Models on which eval() was called, and which have computed nothing since."""


def restores(module: Any) -> int | None:
    """load_state_dict of any module: the number of the model that contains it."""
    model = models.of(module) or models.inside(module) or _has_part(module)
    inner = model.inner() if model is not None else None
    if model is not None and model.how == "ddp" and inner is not None:
        evaluations.load(model.evaluation, inner)
    return model.number if model is not None else None


def _has_part(module: Any) -> models.Model | None:
    """The model that has the first parameter of a module."""
    found = next((models.owner(parameter) for parameter in module.parameters()), None)
    return found[0] if found else None


class _Locator:
    """A hook on all modules, installed for a few steps and during evaluation, that sees calls past a wrapper."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._until_step = 0
        self._evaluating = False

    def watch(self, steps: int = _WATCH_STEPS) -> None:
        self._until_step = max(self._until_step, recorder.counts.optimizer_steps + steps)
        self._set()

    def evaluate(self, is_on: bool) -> None:
        self._evaluating = is_on
        self._set()

    def step(self) -> None:
        steps = recorder.counts.optimizer_steps
        if self._until_step <= steps < _COPIES_UNTIL and self._handle is not None and _expects_copies():
            self._until_step = steps + _WATCH_STEPS
        self._set()

    def _set(self) -> None:
        is_on = self._evaluating or recorder.counts.optimizer_steps < self._until_step
        if is_on and self._handle is None and not recorder.is_compiled:
            self._handle = torch.nn.modules.module.register_module_forward_pre_hook(_called)
        elif self._handle is not None and (not is_on or recorder.is_compiled):
            self._handle.remove()
            self._handle = None


_locator = _Locator()
watch_forwards = _locator.watch
models.on_wrapped.append(watch_forwards)


def _called(module: Any, arguments: Any) -> None:
    """A forward pass of any module."""
    if not torch.compiler.is_compiling():
        model = models.inside(module)
        if _due and not module.training:
            recorder.guard("parts of models in evaluations", _note_part, module, arguments)
        if model is not None and not model.active:
            recorder.guard("calls past a wrapper", _called_past, module, model, arguments)
        elif model is None and id(module) not in _seen and models.of(module) is None:
            _seen.add(id(module))
            recorder.guard("copies of models", _note_copy, module)
            for function in on_called:
                recorder.guard(function.__module__, function, module)
        if module._parameters and torch.is_grad_enabled():
            recorder.guard("parameters used past a wrapper", _used, next(iter(module._parameters.values())))


on_called: list[Callable[[Any], None]] = []
"""Called with each module that is not a wrapped model, before its first forward pass."""


def _note_part(module: Any, inputs: Any) -> None:
    """A framework may call only submodules. Whole models are recorded once DDP has made their buffers equal."""
    model = _has_part(module)
    is_whole = models.of(module) is not None or models.inside(module) is not None
    if model is not None and model.number in _due and not model.active and not is_whole:
        recorder.counts.forwards_eval += 1
        _note_evaluation(model, inputs)


_seen: set[int] = set()
copies: Registry[tuple[int, list[str | int] | None, str | None]] = Registry()
"""Their number, where they were first called, and a digest of their parameters, if that was before the first step."""
_COPIES_UNTIL = 1000


def _note_copy(module: Any) -> None:
    """A module with the names of a wrapped model, such as its average. Its final state is recorded at the end."""
    names = [name for name, _ in module.named_parameters()]
    if _is_copy(module, names):
        digest = None if recorder.counts.optimizer_steps else models.weights_of(module)
        copies.put(module, (len(list(copies.items())), places.here(), digest))


def _is_copy(module: Any, names: list[str]) -> bool:
    is_like = any(names == list(model.trainable) for model in models.told()) and bool(names)
    return is_like and not any(models.owner(parameter) for parameter in module.parameters())


def _expects_copies() -> bool:
    """True if a module has the names of a wrapped model, and nobody has called it so far."""
    firsts = {next(iter(model.trainable), "").partition(".")[0] for model in models.told()}
    others = [each for each, _ in module_creation.modules.items() if {*each._modules, *each._parameters} & firsts]
    others = [each for each in others if id(each) not in _seen]
    return any(_is_copy(each, [name for name, _ in each.named_parameters()]) for each in others)


def _called_past(module: Any, model: models.Model, inputs: Any) -> None:
    if not module.training:
        recorder.counts.forwards_eval += 1
        _note_evaluation(model, inputs)
    elif torch.is_grad_enabled():
        model.bypassed += 1
        if model.bypassed == 1:
            recorder.emit("bypass", at=wrapper_bypass.outside(module), model=model.number, forwards_bypassed=1)


def _used(parameter: Any) -> None:
    """A parameter of a DDP model is used in training, outside the wrapper's forward pass."""
    model, _ = models.owner(parameter) or (None, "")
    if model is None or model.how != "ddp" or model.active or model.past_at or not parameter.requires_grad:
        return
    inner = model.inner()
    model.past_at = wrapper_bypass.outside(inner) if inner is not None and inner.training else None


_reads = wrapper_bypass.Reads(_used)


def watch_reads() -> None:
    """True if all backward passes of a step came from no forward pass of a wrapper."""
    _reads.begin(_WATCH_STEPS)


def after_step() -> None:
    """An optimizer has stepped."""
    _locator.step()
    _reads.set(not any(model.bypassed for model in models.told()))


def mode_set(module: Any, mode: bool = True) -> After:
    """Module.train, which Module.eval calls."""
    model = models.of(module) or models.inside(module)
    if model is not None:
        model.evaluation_at = None if mode else places.here()
        model.evaluation.is_due |= not mode
        (_due.discard if mode else _due.add)(model.number)
        _locator.evaluate(not mode)
    return None


def compiled(*_: Any, **__: Any) -> After:
    """torch.compile: compiled forward passes are invisible, so nothing is reported about them."""
    if places.is_by_user(sys._getframe(3)):
        recorder.is_compiled = True
        after_step()
    return None


def backward_begins() -> dict[int, dict[str, Any]]:
    """For each DDP model: whether this backward exchanges gradients. A model without a forward pass does not."""
    found: dict[int, dict[str, Any]] = {}
    for model in models.told():
        wrapper = model.wrapper()
        if model.how != "ddp" or wrapper is None or recorder.is_compiled:
            continue
        flag = bool(wrapper.require_backward_grad_sync)
        is_late = model.pending > 0 and flag != model.synced
        found[model.number] = {"synced": model.pending > 0 and bool(model.synced), "flag_set_late": is_late}
        found[model.number] |= {"pending": model.pending, "unsynced_at": model.unsynced_at}
        found[model.number] |= {"evaluating": model.evaluating and (model.evaluation_at or True)}
        if model.past_at and not model.pending and not model.bypassed:
            model.bypassed += 1
            recorder.emit("bypass", at=model.past_at, model=model.number, forwards_bypassed=1, part=True)
        model.pending = 0
    return found


def backward_ends() -> None:
    """Calls within this backward belong to a checkpoint, and calls before it are finished."""
    for model in models.told():
        model.past_at = None
