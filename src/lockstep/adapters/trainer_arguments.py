"""Arguments of Lightning's Trainer as keys of the config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lockstep.adapters.foreign import DOCS, Keys
from lockstep.core.errors import UsageError, did_you_mean

_PRECISION = {"32": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}
_IGNORED = frozenset(
    """
    accelerator strategy logger enable_progress_bar enable_model_summary enable_checkpointing default_root_dir
    num_sanity_val_steps inference_mode use_distributed_sampler profiler devices num_nodes enable_autolog_hparams
    model_registry
    """.split()  # noqa: SIM905 - a table of words
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "fast_dev_run": (False,),
    "limit_train_batches": (None, 1.0),
    "limit_val_batches": (None, 1.0),
    "overfit_batches": (0, 0.0),
    "sync_batchnorm": (False,),
    "detect_anomaly": (False,),
    "barebones": (False,),
    "plugins": (None, []),
    "reload_dataloaders_every_n_epochs": (0,),
    "gradient_clip_algorithm": (None, "norm"),
    "min_epochs": (None,),
    "min_steps": (None,),
    "val_check_interval": (None, 1.0),
}
"""Arguments that may have these values only."""
_HARMLESS_CALLBACKS = ("LearningRateMonitor", "ModelSummary", "RichModelSummary", "DeviceStatsMonitor", "Timer")


def keys_of(trainer: Mapping[str, Any], batch: int, *, validates: bool) -> tuple[Keys, list[str]]:
    """The keys that arguments of Lightning's Trainer mean, and lines for the log.

    Args:
        batch: the batch size of the loader, which Lightning gives to each device.
        validates: whether there are evaluation data.

    Raises:
        UsageError: arguments that have no counterpart; names all of them.
    """
    keys: Keys = {}
    given, faults, ignored = dict(trainer), list[str](), list[str]()
    ranks = math.prod(devices_of(given))
    every = given.pop("accumulate_grad_batches", 1)
    keys["batch.global"] = batch * ranks * every
    if ranks > 1:
        ignored.append(f"devices and num_nodes: start with --nproc; batch.global={batch * ranks * every} is theirs")
    if validates:
        keys["train.eval_every_epochs"] = given.pop("check_val_every_n_epoch", 1)
    if isinstance(interval := given.get("val_check_interval"), int) and not isinstance(interval, bool):
        del given["val_check_interval"]
        keys.pop("train.eval_every_epochs", None)
        keys["train.eval_every_steps"] = max(1, interval // every)
    for name, value in given.items():
        if name in _IGNORED:
            ignored += [name] if name not in ("devices", "num_nodes") else []
        elif name in _ONLY:
            faults += [] if value in _ONLY[name] else [f"{name}={value!r}: has no counterpart"]
        else:
            _translate(name, value, keys, faults)
    if "train.steps" in keys and "train.epochs" in keys:
        faults.append("max_epochs and max_steps: give one of them")
    if faults:
        remedy = f"leave them out, and give keys of the config: docs/config.md, {DOCS}"
        text = "\n  ".join(["arguments of Lightning's Trainer that cannot be kept:", *faults])
        raise UsageError(text, remedy=remedy)
    return keys, [f"ignored arguments of Lightning's Trainer: {', '.join(ignored)}"] if ignored else []


def devices_of(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """`devices` and `num_nodes`; 1 where they are no numbers, or not given."""
    devices, nodes = (trainer.get(name, 1) for name in ("devices", "num_nodes"))
    return tuple(count if isinstance(count, int) and count > 0 else 1 for count in (devices, nodes))  # type: ignore[return-value]


def _translate(name: str, value: Any, keys: Keys, faults: list[str]) -> None:
    plain = {
        "gradient_clip_val": "optim.clip_norm",
        "log_every_n_steps": "log.every_steps",
        "deterministic": "compute.deterministic",
        "benchmark": "compute.cudnn_benchmark",
    }
    if name in ("max_epochs", "max_steps"):
        if value not in (None, -1):
            keys["train.epochs" if name == "max_epochs" else "train.steps"] = value
    elif name == "max_time":
        if value is not None:
            keys["train.max_time"] = _seconds(value)
    elif name == "precision":
        if value is not None and str(value) not in _PRECISION:
            faults.append(f"precision={value!r}: there are {', '.join(_PRECISION)}")
        elif value is not None:
            keys["precision"] = _PRECISION[str(value)]
    elif name == "callbacks":
        for one in value if isinstance(value, list | tuple) else [value] if value else []:
            _callback(one, keys, faults)
    elif name in plain:
        if value:
            keys[plain[name]] = bool(value) if name in ("deterministic", "benchmark") else value
    else:
        known = [*plain, *_ONLY, *_IGNORED, "max_epochs", "max_steps", "precision", "accumulate_grad_batches"]
        faults.append(f"{name}: is unknown; {did_you_mean(name, known)}".rstrip("; "))


def _callback(one: Any, keys: Keys, faults: list[str]) -> None:
    kind = type(one).__name__
    if kind == "EarlyStopping" and one.monitor:
        rule = {"metric": f"eval/{one.monitor}", "mode": one.mode, "patience": one.patience}
        keys["train.stop_when"] = rule | {"min_delta": abs(float(one.min_delta))}
    elif kind == "ModelCheckpoint":
        if one.monitor:
            keys["checkpoint.keep_best"] = f"{one.mode} eval/{one.monitor}"
    elif kind not in _HARMLESS_CALLBACKS and "Progress" not in kind:
        faults.append(f"the callback {kind}: write a lockstep.Part, docs/adapters.md#a-callback-becomes-a-part")


def _seconds(value: Any) -> float:
    """Lightning's max_time: DD:HH:MM:SS, a timedelta, or a dict of its arguments."""
    if isinstance(value, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", value):
        days, hours, minutes, seconds = map(int, value.split(":"))
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    import datetime

    found = datetime.timedelta(**value) if isinstance(value, Mapping) else value
    return float(found.total_seconds())
