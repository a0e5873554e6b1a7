"""Observes what Accelerate, Lightning and transformers offer for metrics."""

from __future__ import annotations

import re
import sys
from types import FunctionType
from typing import Any

import torch

from lockstep_audit.observe import digests, places, torch_state
from lockstep_audit.observe.data import IGNORED
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_EACH_LINE = 20
_FLAGS = ("should_stop", "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate")
_OF_TIME = ("_runtime", "_per_second", "_time")
_PART = r"times?|runtime|seconds?|secs?|elapsed|speed|throughput|mem|memory|cpu|gpu|local|rank_?\d+"
_OF_TRAINER = "(train_)?loss|grad_norm|learning_rate|lr|epoch|(global_)?step|total_flos|num_input_tokens_seen|rank"
_UNTOLD = re.compile(rf"^({_OF_TRAINER})$|(^|[_/. -])({_PART})($|[_/. -])|per_s|_m?s$")
"""Numbers that a Trainer gathers, or that differ between ranks by their nature."""
_MEAN = 1
"""The reduction of torch's losses that is a mean."""
_depth = 0


def gathered(*_: Any, **__: Any) -> After:
    """Accelerator.gather_for_metrics, which removes repeated samples."""
    global _depth
    recorder.counts.gathered += 1
    _depth += 1

    def after(result: Any, error: BaseException | None) -> None:
        global _depth
        _depth -= 1

    return after


def gathers(*_: Any, **__: Any) -> After:
    """Accelerator.gather by the script."""
    if not _depth:
        recorder.emit("gather", limit=_EACH_LINE, at=places.here())
    return None


def padded(_: Any, tensor: Any, dim: int = 0, pad_index: int = 0, *__: Any, **___: Any) -> After:
    """Accelerator.pad_across_processes of whole numbers: whether the padding is a value that they also contain."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        firsts, lasts = (list(digests.tensors_in(each, 2)) for each in (tensor, result))
        for before, now in zip(firsts, lasts, strict=False):
            if before.dtype == torch.int64 and isinstance(pad_index, int):
                told = {"ignored": bool((before == IGNORED).any()), "held": bool((before == pad_index).any())}
                added = now.numel() - before.numel()
                recorder.emit("padded", limit=_EACH_LINE, at=at, index=pad_index, added=added, **told)

    return after


def state_loaded(accelerator: Any, *_: Any, **__: Any) -> None:
    """Accelerator.load_state, which loads only into what was prepared before."""
    held = [getattr(accelerator, name, None) for name in ("_models", "_optimizers", "_custom_objects")]
    recorder.emit("load_state", limit=_EACH_LINE, at=places.here(), objects=sum(len(each or ()) for each in held))


def logged(module: Any, name: Any, value: Any = None, *arguments: Any, **named: Any) -> After:
    """LightningModule.log in an evaluation. Lightning exchanges metrics of torchmetrics itself."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None or not torch_state.has_other_ranks() or trainer.training or trainer.sanity_checking:
        return None
    if isinstance(value, (torch.Tensor, int, float)):
        told = {"name": str(name), "exchanged": bool(named.get("sync_dist")), "world": int(trainer.world_size)}
        told["only_zero"] = bool(named.get("rank_zero_only")) or None
        recorder.emit("log", limit=_EACH_LINE, at=places.here(), value=float(value), **told)
    return None


_entries: Registry[int] = Registry()
"""By Trainer, the number of entries in its history after its last log."""


def noted(trainer: Any, logs: Any = None, *_: Any, **__: Any) -> After:
    """transformers' Trainer.log of the script's numbers: passed by it, or added by the one callback that can."""
    if not torch_state.has_other_ranks():
        return None
    given, history = dict(logs or {}), trainer.state.log_history
    if places.is_by_user(sys._getframe(3)):
        _note(trainer, given, places.here())
    told_before = _entries.get(trainer)
    for entry in history[len(history) if told_before is None else told_before :]:
        _note(trainer, entry)

    def after(result: Any, error: BaseException | None) -> None:
        told = {**(logs or {}), **(history[-1] if history else {})}
        _note(trainer, {name: value for name, value in told.items() if name not in given})
        _entries.put(trainer, len(history))

    return after


def _adds(trainer: Any, key: str) -> list[str | int] | None:
    """The first line of the script's callback that may add to a log: the one that contains the key, or the only one."""
    found = []
    for callback in trainer.callback_handler.callbacks:
        for name, method in vars(type(callback)).items():
            if isinstance(method, FunctionType) and places.is_of_user(method):
                found += [method.__code__] if name == "on_log" or "log_history" in method.__code__.co_names else []
    has_key = [
        code
        for code in found
        if key in (*code.co_consts, *sum((each for each in code.co_consts if isinstance(each, tuple)), ()))
    ]
    code = has_key[0] if has_key else found[0] if len(found) == 1 else None
    return [places.kind_of(code)[1], code.co_firstlineno, code.co_name] if code else None


def _note(trainer: Any, logs: dict[str, Any], at: list[str | int] | None = None) -> None:
    best = str(getattr(trainer.args, "metric_for_best_model", None))
    for name, value in logs.items():
        is_metric = str(name).startswith(("eval_", "test_")) and not str(name).endswith(_OF_TIME)
        if isinstance(value, (int, float)) and (is_metric or not _UNTOLD.search(str(name))):
            told = {"name": str(name), "value": float(value), "world": int(trainer.args.world_size)}
            told |= {"decides": name in (best, f"eval_{best}")} if is_metric else {"is_training": True}
            if line := at or _adds(trainer, str(name)):
                recorder.emit("log", limit=_EACH_LINE, at=line, exchanged=False, **told)


def scaled(trainer: Any, model: Any, *_: Any, **__: Any) -> After:
    """transformers' Trainer.compute_loss, which multiplies a loss by the number of ranks because it takes it for
    a sum that was divided by the items of all ranks."""
    if not recorder.is_sampled(recorder.counts.optimizer_steps) or not torch_state.has_other_ranks():
        return None

    def after(result: Any, error: BaseException | None) -> None:
        loss = result[0] if isinstance(result, tuple) else result
        root: Any = getattr(loss, "grad_fn", None)
        by = getattr(root, "_saved_other", None)
        if error is None and isinstance(by, (int, torch.Tensor)) and by == trainer.accelerator.num_processes:
            inner = torch_state.below(root)
            is_mean = type(inner).__name__.startswith("MeanBackward") or getattr(inner, "_saved_reduction", 0) == _MEAN
            code = getattr(trainer.compute_loss_func, "__code__", None)
            own = [code.co_filename, code.co_firstlineno, code.co_name] if code else None
            name = trainer.accelerator.unwrap_model(model).__class__.__name__
            told = {"by": int(by), "mean": is_mean, "model": None if trainer.compute_loss_func else name}
            recorder.emit("scaled_loss", limit=_EACH_LINE, at=own or places.here(), op=type(inner).__name__, **told)

    return after


def asked(thing: Any, name: str, value: Any) -> After:
    """A flag of Lightning's Trainer or of transformers' TrainerControl with which the script asks to stop or save."""
    if name in _FLAGS and bool(value) and not getattr(thing, name, False) and places.is_by_user(sys._getframe(3)):
        recorder.emit("asked", limit=_EACH_LINE, at=places.here(), what=name)
    return None


def ran(trainer: Any, *_: Any, **__: Any) -> After:
    """Trainer.fit of Lightning and Trainer.train of transformers, which may stop early."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        state = getattr(trainer, "state", None)
        is_short = getattr(state, "global_step", 0) < (getattr(state, "max_steps", None) or 0)
        if error is None and (getattr(trainer, "should_stop", False) or is_short):
            recorder.emit("stopped", limit=_EACH_LINE, at=at)

    return after
