"""Observes what Accelerate, Lightning and transformers offer for metrics."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lockstep.audit.observe import places, torch_state
from lockstep.audit.observe.data import After
from lockstep.audit.observe.recorder import recorder

_EACH_LINE = 20
_depth = 0


def gathered(*_: Any, **__: Any) -> After:
    """Accelerator.gather_for_metrics, which takes repeated samples out."""
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


def logged(module: Any, name: Any, value: Any = None, *arguments: Any, **named: Any) -> After:
    """LightningModule.log in an evaluation. A metric of torchmetrics is exchanged by itself."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None or not torch_state.has_other_ranks() or trainer.training or trainer.sanity_checking:
        return None
    if isinstance(value, (torch.Tensor, int, float)):
        told = {"name": str(name), "exchanged": bool(named.get("sync_dist")), "world": int(trainer.world_size)}
        told["only_zero"] = bool(named.get("rank_zero_only")) or None
        recorder.emit("log", limit=_EACH_LINE, at=places.here(), value=float(value), **told)
    return None


def noted(trainer: Any, logs: Any = None, *_: Any, **__: Any) -> After:
    """transformers' Trainer.log by the script, of the number by which checkpoints are the best."""
    name = str(getattr(trainer.args, "metric_for_best_model", None))
    name = name if name.startswith("eval_") else f"eval_{name}"
    if torch_state.has_other_ranks() and name in (logs or ()) and places.is_by_user(sys._getframe(3)):
        told = {"name": name, "value": float(logs[name]), "world": int(trainer.args.world_size), "decides": True}
        recorder.emit("log", limit=_EACH_LINE, at=places.here(), exchanged=False, **told)
    return None


def ran(trainer: Any, *_: Any, **__: Any) -> After:
    """Trainer.fit of Lightning and Trainer.train of transformers, which may stop before they were asked to."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        state = getattr(trainer, "state", None)
        is_short = getattr(state, "global_step", 0) < (getattr(state, "max_steps", None) or 0)
        if error is None and (getattr(trainer, "should_stop", False) or is_short):
            recorder.emit("stopped", limit=_EACH_LINE, at=at)

    return after
