"""The words of Lightning, Accelerate, transformers, torchrun and Keras for our keys and options.

It imports no torch, and pydantic only to answer: `lockstep --help` needs neither.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

TABLE = """
train.epochs: epoch epochs max_epoch max_epochs n_epochs nb_epochs num_epoch num_epochs num_train_epochs
train.steps: max_iters max_steps max_train_steps num_steps num_train_steps n_steps train_steps training_steps
train.eval_every_epochs: check_val_every_n_epoch eval_every eval_freq validation_freq
train.eval_every_steps: eval_every_n_steps eval_interval eval_steps val_check_interval val_interval
train.parts=[FILE.py:CLASS]: callback callbacks
train.stop_when.metric=eval/loss train.stop_when.mode=min train.stop_when.patience={}: early_stopping_patience patience
train.init_from: init_from_checkpoint load_from pretrained pretrained_weights
optim.lr: base_lr init_lr initial_lr learning_rate lr max_lr
optim.name: optim optimiser optimizer optimizer_name
optim.weight_decay: decay wd
optim.clip_norm: clip clip_grad clip_grad_norm clipnorm global_clipnorm grad_clip grad_norm gradient_clip
optim.clip_norm: gradient_clip_val gradient_clipping max_grad_norm max_norm
optim.args.momentum: momentum sgd_momentum
optim.args.betas=[BETA1,BETA2]: adam_beta1 adam_beta2 beta1 beta2 beta_1 beta_2 betas
optim.args.eps: adam_epsilon eps epsilon
schedule.name: lr_schedule lr_scheduler lr_scheduler_type scheduler
schedule.warmup_steps: lr_warmup_steps num_warmup_steps warmup
schedule.warmup_share: warmup_fraction warmup_proportion warmup_ratio
batch.global: batch batch_size batchsize bs global_batch global_batch_size total_batch_size train_batch_size
batch.micro: batch_size eval_batch_size micro_batch micro_batch_size per_device_eval_batch_size val_batch_size
batch.per_rank: batch_size_per_device local_batch_size per_device_batch_size
batch.per_rank: per_device_train_batch_size per_gpu_batch_size per_gpu_train_batch_size
batch.accumulate: accum accum_iter accumulate_grad_batches accumulation_steps grad_accum grad_accum_steps
batch.accumulate: gradient_accumulation gradient_accumulation_steps
data.train: data data_dir data_path data_root dataset dataset_dir dataset_name dataset_path train_data train_dir
data.train: train_file train_path training_data
data.eval: eval_data eval_dataset eval_file test_data test_file val_data val_dir val_file valid_data validation_data
data.eval: validation_file
data.eval_limit: limit_val_batches max_eval_samples
data.workers: dataloader_num_workers n_workers num_worker num_workers
data.prefetch: dataloader_prefetch_factor prefetch_factor
data.start_method: multiprocessing_context
data.drop_last: dataloader_drop_last
task.model: model model_id model_name model_name_or_path pretrained_model_name_or_path
task.label_smoothing: label_smoothing label_smoothing_factor
task.image_size: image_size img_size imgsz input_size
seed: data_seed manual_seed random_seed random_state seed_everything
name: exp_name experiment experiment_name job_name run_name
device: accelerator
device=cpu: cpu no_cuda use_cpu
precision: amp amp_dtype autocast dtype mixed_precision mixed_precision_type
precision=bf16: bf16
precision=fp16: fp16 half use_amp
parallel.strategy: distributed_strategy distributed_type strategy
parallel.strategy=fsdp: fsdp use_fsdp
parallel.tensor: tensor_parallel tensor_parallel_size tp tp_size
parallel.timeout_s: ddp_timeout
parallel.bucket_mb: bucket_cap_mb ddp_bucket_cap_mb
parallel.find_unused_parameters: ddp_find_unused_parameters
compute.compile: torch_compile use_compile
compute.compile_backend: dynamo_backend torch_compile_backend
compute.compile_mode: dynamo_mode torch_compile_mode
compute.activation_checkpointing=true: grad_checkpointing gradient_checkpointing
compute.cudnn_benchmark: benchmark
compute.deterministic: full_determinism
compute.matmul_precision=high: allow_tf32 tf32
checkpoint.every_steps: save_every save_every_n_steps save_freq save_interval save_steps
checkpoint.keep_last: save_last save_top_k save_total_limit
checkpoint.keep_best=[min,eval/loss]: load_best_model_at_end metric_for_best_model monitor
log.every_steps: log_every log_every_n_steps log_freq log_interval logging_steps print_freq
log.probe_every_epochs: probe_every probe_interval
log.writers=[text_log,json_lines,{}]: log_with logger loggers report_to tracker tracker_name
--run-dir: checkpoint_dir default_root_dir log_dir logdir output output_dir project_dir run_dir save_dir work_dir
--out: output output_dir output_file
--fresh: overwrite_output_dir
--gpus-per-node: gpus gres
--nproc: devices gpu_count gpus n_gpu n_gpus n_procs ngpus ngpus_per_node nproc_per_node nprocs ntasks_per_node
--nproc: num_devices num_gpu num_gpus num_proc num_procs num_processes world_size
--nnodes: n_nodes nodes num_machines num_nodes
--nodes: n_nodes nnodes num_machines num_nodes
--rendezvous: main_process_ip master_addr master_address rdzv_endpoint
--rendezvous-id: rdzv_id
--preset: config_file
leave it out, the same command resumes the run: auto_resume checkpoint_path ckpt ckpt_path initial_epoch resume
leave it out, the same command resumes the run: resume_from resume_from_checkpoint
leave it out, --nproc starts the ranks: local_rank multi_gpu standalone
leave it out, the nodes meet at --rendezvous HOST:PORT: machine_rank main_process_port master_port node_rank
leave it out, the nodes meet at --rendezvous HOST:PORT: rdzv_backend rdzv_conf
give FILE.yaml instead of the recipe: cfg conf config config_name config_path
"""
"""What we write: what others write. A word in several rows means what the command takes, the upper row first. `{}` is
the word's value, which a key without `=` gets, too."""
TRAIN_OPTIONS: tuple[str, ...] = ("--run-dir", "--fresh", "--allow-change", "--nproc", "--preset", "--max-restarts")
TRAIN_OPTIONS += ("--nnodes", "--rendezvous", "--rendezvous-id")
"""Options of `lockstep train` that users write as keys."""
_ANY_VALUE = "VALUE"


@functools.cache
def table() -> dict[str, list[str]]:
    """What each word of the table may mean, in the order of the table."""
    found: dict[str, list[str]] = {}
    for row in TABLE.strip().splitlines():
        ours, _, theirs = row.rpartition(": ")
        for word in theirs.split():
            found.setdefault(word, []).append(ours)
    return found


def meant(
    word: str,
    value: str | None = None,
    *,
    options: Collection[str] = TRAIN_OPTIONS,
    keys: Sequence[str] | None = None,
) -> str:
    """What to write for a word of others, such as `train.epochs=3` for `--epochs` and `3`. Empty: it is not known.

    Args:
        word: as it was written, as a key or with dashes as an option.
        value: None: there is none.
        options: those that the command has.
        keys: those that the command takes, or sections. None: all.
    """
    from lockstep.core.config.sections import all_keys

    plain = word.strip("-").lower().replace("-", "_")
    own = f"--{plain.replace('_', '-')}"
    if own in options:
        return f"{own} {value}" if value and value != "True" else own
    last = plain.rpartition(".")[2]
    paths = [path for path, _ in all_keys()]
    leaves = [path for path in paths if path.rpartition(".")[2] == last]
    found = [plain] if plain in paths else table().get(last, leaves if len(leaves) == 1 else [])
    for ours in found:
        if is_advice(ours):
            return ours
        if ours.startswith("--"):
            if ours in options:
                return f"{ours} {value or _ANY_VALUE}"
        elif keys is None or any(f"{ours.partition('=')[0]}.".startswith(f"{key}.") for key in keys):
            return (ours if "=" in ours else f"{ours}={{}}").replace("{}", value or _ANY_VALUE)
    return ""


def is_advice(text: str) -> bool:
    """True if what `meant` returns says what to do, and is not to be written."""
    return text.startswith(("leave it out", "give "))


def to_write(text: str) -> str:
    """What `meant` returns, as the end of a message."""
    return f"write {text}" if text and not is_advice(text) else text
