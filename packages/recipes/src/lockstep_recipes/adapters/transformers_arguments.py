"""Convert TrainingArguments of transformers to config keys, and keep the rest for the task."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.foreign_task import DOCS, Keys

# The defaults of the supported arguments in transformers 5.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "activation_checkpointing": None,
    "gradient_checkpointing": None,
    "logging_steps": 500,
    "eval_strategy": "no",
    "eval_steps": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "seed": 42,
    "full_determinism": False,
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "remove_unused_columns": True,
    "label_names": None,
}
IGNORED = frozenset(
    """
    accelerator_config auto_find_batch_size average_tokens_across_devices bf16_full_eval dataloader_in_order
    dataloader_multiprocessing_context dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object fp16_full_eval
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_num_input_tokens_seen length_column_name local_rank log_level log_level_replica log_on_each_node
    logging_dir logging_first_step logging_nan_inf_filter logging_strategy no_cuda output_dir overwrite_output_dir
    per_device_eval_batch_size prediction_loss_only project push_to_hub report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_safetensors skip_memory_metrics torch_empty_cache_steps trackio_bucket_id trackio_space_id
    trackio_static_space_id use_cache use_cpu
    """.split()  # noqa: SIM905 - a table of words
)
REFUSED = {
    "activation_checkpointing_kwargs": "compute.activation_checkpointing=true, without further arguments",
    "batch_eval_metrics": "compute_metrics gets all samples at once",
    "data_seed": "there is a single seed: the config key seed",
    "deepspeed": "parallel.strategy=fsdp",
    "fsdp": "parallel.strategy=fsdp",
    "fsdp_config": "parallel.strategy=fsdp",
    "gradient_checkpointing_kwargs": "compute.activation_checkpointing=true, without further arguments",
    "group_by_length": "data.group_by_length=N, for data with the attribute `lengths`",
    "include_for_metrics": "compute_metrics gets predictions and labels; for more, write a Task",
    "label_smoothing_factor": "give the model a loss with label_smoothing, or write a Task",
    "liger_kernel_config": "change the model before passing it",
    "neftune_noise_alpha": "add the noise in the model, or write a Task",
    "optim_args": "remove optim, and set optim.name=CLASS optim.args={...}",
    "optim_target_modules": "optim.groups: lockstep --explain optimizers",
    "parallelism_config": "parallel.strategy=fsdp, or parallel.tensor: lockstep --explain mesh",
    "torch_compile": "compute.compile=auto",
    "torch_compile_backend": "compute.compile=auto",
    "torch_compile_mode": "compute.compile=auto",
    "train_sampling_strategy": "data.group_by_length=N, for data with the attribute `lengths`",
    "use_liger_kernel": "change the model before passing it",
}
"""Arguments that must keep their defaults, with what to give instead."""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {}, "random")  # defaults of refused arguments
OF_TRAINER = {
    "callbacks": "a lockstep.Part: lockstep --explain adapters",
    "compute_loss_func": "write a Task, whose loss is the sum of the losses: lockstep --explain tasks",
    "optimizer_cls_and_kwargs": "remove the argument, and set optim.name=CLASS optim.args={...}",
    "optimizers": "optim and lr_scheduler_type; or a Task with an optimizer: lockstep --explain optimizers",
    "tokenizer": "processing_class, as in transformers 5",
}
"""Arguments of transformers' Trainer that the adapter does not take, with what to do instead."""
_WHY = {
    "auto_find_batch_size": " (out of memory, Lockstep halves the micro-batch; `lockstep tune batch` finds the largest)"
}
OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}
_STATEFUL = ("reduce_lr_on_plateau", "greedy")


def understood(args: Any) -> tuple[SimpleNamespace, list[str]]:
    """The arguments completed by their defaults, and a line that names the ignored ones.

    Args:
        args: TrainingArguments, a mapping of some of them, or the path of a YAML file with them.

    Raises:
        UsageError: an argument differs from its default and has no counterpart; names all of them.
    """
    where = "args"
    if isinstance(args, str | Path):
        import yaml

        where, args = str(args), yaml.safe_load(Path(args).read_text(encoding="utf-8"))
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        given = {one.name: getattr(args, one.name, None) for one in dataclasses.fields(args)}
        known = {one.name: _default(one) for one in dataclasses.fields(args)}
        given = {name: value for name, value in given.items() if name in DEFAULTS or not _same(value, known[name])}
    else:
        given = dict(args or {})
    faults, ignored = [], []
    for name, value in given.items():
        if name in IGNORED:
            ignored.append(name + _WHY.get(name, ""))
        elif name not in DEFAULTS and value not in _NEUTRAL:
            remedy = REFUSED.get(name) or did_you_mean(name, DEFAULTS).strip() or "Lockstep has no counterpart"
            faults.append(f"{name}={value!r}: {remedy}")
    found = SimpleNamespace(**DEFAULTS | {name: value for name, value in given.items() if name in DEFAULTS})
    if isinstance(found.lr_scheduler_kwargs, str):
        found.lr_scheduler_kwargs = json.loads(found.lr_scheduler_kwargs)
    for name in ("lr_scheduler_type", "optim", "eval_strategy", "save_strategy"):
        setattr(found, name, str(getattr(getattr(found, name), "value", getattr(found, name))))
    if found.optim not in OPTIMIZERS:
        faults.append(
            f"optim={found.optim!r}: there are {', '.join(OPTIMIZERS)}; or give optim.name of Lockstep's config"
        )
    if found.lr_scheduler_type in _STATEFUL:
        faults.append(
            f"lr_scheduler_type={found.lr_scheduler_type!r}: schedule.name=plateau: lockstep --explain optimizers"
        )
    if faults:
        text = "\n  ".join(["TrainingArguments that are not supported:", *faults])
        raise UsageError(text, where=where, remedy=f"remove them, and set config keys ({DOCS})")
    return found, [f"ignored TrainingArguments: {', '.join(sorted(ignored))}"] if ignored else []


def _default(field: dataclasses.Field[Any]) -> Any:
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def _same(value: Any, default: Any) -> bool:
    return value is None or default is dataclasses.MISSING or value == default


def keys_of(args: SimpleNamespace, samples: int, *, evaluates: bool) -> Keys:
    """The config keys that match the arguments.

    Args:
        samples: the number of training samples.
        evaluates: whether there is evaluation data.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    per_epoch = max(1, samples // batch if args.dataloader_drop_last else -(-samples // batch))
    keys: Keys = {
        "seed": args.seed,
        "batch.global": batch,
        "batch.micro": args.per_device_train_batch_size,
        "optim.lr": args.learning_rate,
        "log.every_steps": _steps(args.logging_steps, per_epoch, args),
        "data.drop_last": args.dataloader_drop_last,
        "data.workers": args.dataloader_num_workers,
        "compute.deterministic": args.full_determinism,
        "compute.activation_checkpointing": bool(args.activation_checkpointing or args.gradient_checkpointing),
    }
    epochs = float(args.num_train_epochs)
    if args.max_steps > 0:
        keys["train.steps"] = args.max_steps
    elif epochs.is_integer():
        keys["train.epochs"] = int(epochs)
    else:
        keys["train.steps"] = math.ceil(epochs * per_epoch)
    if args.max_grad_norm:
        keys["optim.clip_norm"] = args.max_grad_norm
    if args.bf16 or args.fp16:
        keys["precision"] = "bf16" if args.bf16 else "fp16"
    if args.tf32:
        keys["compute.matmul_precision"] = "high"
    if evaluates and args.eval_strategy == "epoch":
        keys["train.eval_every_epochs"] = 1
    elif evaluates and args.eval_strategy == "steps":
        keys["train.eval_every_steps"] = _steps(args.eval_steps or args.logging_steps, per_epoch, args)
    if args.save_strategy in ("steps", "epoch"):
        every = per_epoch if args.save_strategy == "epoch" else _steps(args.save_steps, per_epoch, args)
        keys["checkpoint.every_steps"] = every
    if args.save_total_limit:
        keys["checkpoint.keep_last"] = args.save_total_limit
    if args.load_best_model_at_end or (evaluates and args.save_strategy == "best"):
        keys["checkpoint.keep_best"] = " ".join(_best(args))
    return keys


def _best(args: SimpleNamespace) -> tuple[str, str]:
    """`min` or `max`, and the log's name for the result that `metric_for_best_model` names."""
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    larger = args.greater_is_better if args.greater_is_better is not None else not name.endswith("loss")
    return "max" if larger else "min", f"eval/{name}"


def check_further(given: Mapping[str, Any], args: SimpleNamespace, taken: Collection[str]) -> list[str]:
    """Check the arguments of transformers' Trainer that the adapter does not take, and return lines for the log.

    Args:
        args: of `understood`.
        taken: the names of the arguments that the adapter takes.

    Raises:
        UsageError: arguments are not supported. Names all of them, and what to use instead.
    """
    faults, ignored = [], []
    for name, value in given.items():
        if name not in OF_TRAINER:
            remedy = did_you_mean(name, [*taken, *OF_TRAINER]).strip() or "transformers' Trainer has no such argument"
            faults.append(f"{name}: unknown argument; {remedy}")
        elif name != "callbacks":
            is_empty = value is None or (isinstance(value, tuple) and all(one is None for one in value))
            faults += [] if is_empty else [f"{name}: {OF_TRAINER[name]}"]
        else:
            for one in value if isinstance(value, list | tuple) else [value] if value else []:
                kind = one if isinstance(one, type) else type(one)
                if kind.__module__.startswith("transformers.") and kind.__name__ not in ("EarlyStoppingCallback",):
                    ignored.append(kind.__name__)
                elif kind.__module__.startswith("transformers.") and not isinstance(one, type):
                    faults.append(f"callbacks: {kind.__name__}: {_stop_rule(one, args)}")
                else:
                    faults.append(f"callbacks: {kind.__name__}: {OF_TRAINER[name]}")
    if faults:
        text = "\n  ".join(["arguments of transformers' Trainer that are not supported:", *faults])
        raise UsageError(text, where="adapters.transformers", remedy=f"remove them ({DOCS})")
    return [f"ignored callbacks of transformers: {', '.join(ignored)}"] if ignored else []


def _stop_rule(callback: Any, args: SimpleNamespace) -> str:
    mode, metric = _best(args)
    rule = f"metric: {metric}, mode: {mode}, patience: {callback.early_stopping_patience}"
    if callback.early_stopping_threshold:
        rule += f", min_delta: {callback.early_stopping_threshold}"
    return f"train.stop_when='{{{rule}}}'"


def _steps(value: float, per_epoch: int, args: SimpleNamespace) -> int:
    """A number of steps; below 1, a fraction of the run."""
    if value >= 1:
        return int(value)
    total: float = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return max(1, math.ceil(value * total))
