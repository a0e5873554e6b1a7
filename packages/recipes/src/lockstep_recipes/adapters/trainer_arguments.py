"""Convert arguments of Lightning's Trainer to config keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.foreign_task import DOCS, Keys
from lockstep_recipes.adapters import callbacks

_PRECISION = {"32": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}
IGNORED = frozenset(
    """
    accelerator strategy logger enable_progress_bar enable_model_summary enable_checkpointing default_root_dir
    num_sanity_val_steps inference_mode use_distributed_sampler profiler devices num_nodes enable_autolog_hparams
    model_registry limit_test_batches limit_predict_batches
    """.split()  # noqa: SIM905 - a table of words
)
ONLY: dict[str, tuple[Any, ...]] = {
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
"""Arguments that may only have these values."""
_PLAIN = {
    "gradient_clip_val": "optim.clip_norm",
    "log_every_n_steps": "log.every_steps",
    "deterministic": "compute.deterministic",
    "benchmark": "compute.cudnn_benchmark",
}
KEPT = frozenset(
    {*_PLAIN, "accumulate_grad_batches", "callbacks", "check_val_every_n_epoch", "max_epochs", "max_steps"}
    | {"max_time", "precision", "val_check_interval"}
)
"""Arguments that become config keys."""


def keys_of(trainer: Mapping[str, Any], batch: int, *, validates: bool) -> tuple[Keys, list[str]]:
    """The config keys that match arguments of Lightning's Trainer, and lines for the log.

    Args:
        batch: the batch size of the loader, which Lightning gives to each device.
        validates: whether there is evaluation data.

    Raises:
        UsageError: arguments have no counterpart. Names all of them.
    """
    keys: Keys = {}
    given, faults, ignored = dict(trainer), list[str](), list[str]()
    ranks, every = math.prod(devices_of(given)), accumulated(given, faults)
    given.pop("accumulate_grad_batches", None)
    keys["batch.global"] = batch * ranks * every
    if ranks > 1:
        ignored.append(f"devices and num_nodes (start with --nproc; they set batch.global={batch * ranks * every})")
    epochs = given.pop("check_val_every_n_epoch", 1)
    if validates and epochs is not None:
        keys["train.eval_every_epochs"] = epochs
    if isinstance(interval := given.get("val_check_interval"), int) and not isinstance(interval, bool):
        del given["val_check_interval"]
        keys.pop("train.eval_every_epochs", None)
        if validates:
            keys["train.eval_every_steps"] = max(1, interval // every)
    callbacks.translate(given.pop("callbacks", None), keys, faults, ignored)
    for name, value in given.items():
        if name in IGNORED:
            counts = name in ("devices", "num_nodes") and (ranks > 1 or value == 1)
            ignored += [] if counts or value is None else [name]
        elif name in ONLY:
            faults += [] if value in ONLY[name] else [f"{name}={value!r}: has no counterpart"]
        else:
            _translate(name, value, keys, faults)
    if "train.steps" in keys and "train.epochs" in keys:
        faults.append("max_epochs and max_steps: give one of them")
    if faults:
        remedy = f"remove them, and set config keys: lockstep --explain config, {DOCS}"
        text = "\n  ".join(["arguments of Lightning's Trainer that are not supported:", *faults])
        raise UsageError(text, remedy=remedy)
    return keys, [f"ignored arguments of Lightning's Trainer: {', '.join(ignored)}"] if ignored else []


def devices_of(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """`devices` and `num_nodes` as numbers; 1 if they depend on the machine, or are not given."""

    def count(value: Any) -> int:
        if isinstance(value, str):
            value = [one for one in value.split(",") if one.strip()] if "," in value else value
            value = int(value) if isinstance(value, str) and value.isdigit() else value
        if isinstance(value, list | tuple):
            value = len(value)
        return value if isinstance(value, int) and value > 0 else 1

    return count(trainer.get("devices")), count(trainer.get("num_nodes"))


def accumulated(trainer: Mapping[str, Any], faults: list[str] | None = None) -> int:
    """The number of batches in an update. Adds a fault if it is not a single number for the whole run."""
    value: Any = trainer.get("accumulate_grad_batches", 1)
    given: Any = trainer.get("callbacks")
    for one in given if isinstance(given, list | tuple) else [given]:
        if type(one).__name__ == "GradientAccumulationScheduler":
            value = one.scheduling
    if isinstance(value, Mapping):
        numbers = set(value.values())
        if len(numbers) == 1 and (0 in value or numbers == {1}):
            value = numbers.pop()
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value or 1
    if faults is not None:
        what = f"accumulate_grad_batches={value!r}: give one integer for the whole run"
        faults.append(f"{what}; batch.global is the number of samples in an update")
    return 1


def _translate(name: str, value: Any, keys: Keys, faults: list[str]) -> None:
    if name in ("max_epochs", "max_steps"):
        if value not in (None, -1):
            keys["train.epochs" if name == "max_epochs" else "train.steps"] = value
    elif name == "max_time":
        seconds = _seconds(value)
        if value is not None and seconds is None:
            faults.append(f"max_time={value!r}: give 'DD:HH:MM:SS', a timedelta, or a dict of its arguments")
        elif seconds is not None:
            keys["train.max_time"] = seconds
    elif name == "precision":
        if value is not None and str(value) not in _PRECISION:
            faults.append(f"precision={value!r}: there are {', '.join(_PRECISION)}")
        elif value is not None:
            keys["precision"] = _PRECISION[str(value)]
    elif name == "deterministic" and value == "warn":
        faults.append("deterministic='warn': give False, or True, which makes a nondeterministic operation an error")
    elif name in _PLAIN:
        if value:
            keys[_PLAIN[name]] = bool(value) if name in ("deterministic", "benchmark") else value
    else:
        faults.append(f"{name}: unknown argument; {did_you_mean(name, [*KEPT, *ONLY, *IGNORED])}".rstrip("; "))


def _seconds(value: Any) -> float | None:
    """Lightning's max_time: DD:HH:MM:SS, a timedelta, or a dict of its arguments. None: it is something else."""
    import datetime

    if isinstance(value, str) and re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip()):
        days, hours, minutes, seconds = map(int, value.split(":"))
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    try:
        found = datetime.timedelta(**value) if isinstance(value, Mapping) else value
    except TypeError:
        return None
    return found.total_seconds() if isinstance(found, datetime.timedelta) else None
