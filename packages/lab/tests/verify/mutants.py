"""Mutants: engines and tasks with one fault each, which `lockstep verify` must find.

Most mutants edit the package's own source: a text of a function is replaced by another text. The edited code goes into
the function object, so that everybody who imported the function calls the broken code. Workers are shared between
tests, so each edit is taken back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import shutil
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

HERE = Path(__file__).resolve().parent
TASKS = HERE / "broken_tasks.py"

COMMON = (
    "batch.global=20",
    "train.steps=40",
    "optim.lr=0.02",
    "optim.weight_decay=0.01",
    "optim.clip_norm=0.5",
    "optim.lr_scaling=linear",
    "optim.reference_batch=40",
    "schedule.name=cosine",
    "schedule.warmup_steps=4",
    "parallel.timeout_s=60",
    "device=cpu",
)

# By name: the task's class and what its config has besides COMMON. Each is right.
BASES: dict[str, tuple[str, ...]] = {
    "classes": ("Classes",),
    "micro-batches": ("Classes", "batch.micro=3"),
    "dropout": ("Classes", "task.dropout=0.3"),
    "norm": ("Classes", "task.norm=true", "task.length=204"),
    "masked": ("Masked",),
    "masked-micro-batches": ("Masked", "batch.micro=3"),
    "heads": ("TwoHeads",),
    "few": ("Classes", "batch.global=4", "optim.reference_batch=8"),
    "few-masked": ("Masked", "batch.global=4", "optim.reference_batch=8"),
    "ema": ("Classes", "train.ema_decay=0.9"),
    "fp16": ("Classes", "precision=fp16"),
    "overflow": ("Classes", "precision=fp16", "task.factor=300.0"),
    "fsdp": ("Classes", "parallel.strategy=fsdp"),
    "fsdp-ema": ("Classes", "parallel.strategy=fsdp", "train.ema_decay=0.9"),
    "fsdp-norm": ("Classes", "parallel.strategy=fsdp", "task.norm=true", "task.length=204"),
    "workers": ("Classes", "data.workers=1"),
    "dropout-workers": ("Classes", "data.workers=1", "task.dropout=0.3"),
    "groups": ("Classes", "optim.groups=[{name: biases, match: ['*bias'], weight_decay: 0.0, lr: 0.1}]"),
    "momentum": ("Classes", "optim.name=SGD", "optim.lr=0.2", "optim.args={momentum: 0.9}"),
    "unfreeze": ("Classes", "train.unfreeze=[{match: ['body.*'], step: 3}]"),
    "drop-last": ("Classes", "data.drop_last=true"),
    "unused": ("Classes", "parallel.find_unused_parameters=true"),
    "sync": ("Classes", "checkpoint.mode=sync"),
    "tensors": ("Tensors",),
    "on-the-object": ("OnTheObject",),
    "many": ("Many",),
    "rarely": ("Rarely",),
    "forked": ("Forked",),
    "mixed-in-loss": ("MixedInLoss",),
    "mixed-in-loss-by-python": ("MixedInLoss", "task.generator=random"),
    "mixed-in-collate": ("MixedInCollate",),
    "heads-by-rank": ("HeadsByRank",),
    "frozen-norm": ("FrozenNorm", "task.length=204"),
    "wide": ("Classes", "batch.global=128", "optim.reference_batch=128"),
    "tokens": ("Tokens",),
    "grouped": ("Grouped", "data.group_by_length=2"),
    "weighted": ("Weighted",),
    "balanced": ("Classes", "data.balance=label"),
    "own-order": ("OwnOrder",),
    "following": ("Following",),
}

Edit = tuple[str, str, str]  # module:function of the package, its text, what stands there instead


@dataclass(frozen=True)
class Mutant:
    """A training with one fault: edits of the engine, a broken task, or a wrong config."""

    name: str
    check: str
    """The check that must find the fault."""
    base: str = "classes"
    """The training without the fault; a key of BASES."""
    edits: tuple[Edit, ...] = ()
    task: str | None = None
    """A broken class that replaces the base's class."""
    overrides: tuple[str, ...] = ()
    """Options that make the config wrong."""
    says: str = ""
    """A text that names the cause, which the reason of the check must hold."""
    note: bool = False
    """Whether what is wrong may be meant so. Then `says` must be in a note of the check, and nothing is a fault."""

    def is_found(self, outcome: Outcome) -> bool:
        """Whether the check found the fault, and named its cause."""
        result = outcome.checks.get(self.check)
        if result is None:
            return False
        if self.note:
            return any(self.says in note for note in result.notes)
        return result.status == "fault" and self.says in result.reason

    @property
    def words(self) -> str:
        """What is broken."""
        if self.task:
            from packages.lab.tests.verify import broken_tasks

            text = (getattr(broken_tasks, self.task).__doc__ or "").split("\n\n")[0]
            return f"task: {' '.join(text.split())}"
        if self.overrides:
            return f"core.config.sections: {', '.join(self.overrides)}"
        return "; ".join(
            f"{target}: `{' '.join(old.split())}` became `{' '.join(new.split())}`" for target, old, new in self.edits
        )


MUTANTS: dict[str, Mutant] = {}


def _engine(name: str, check: str, *edits: Edit, base: str = "classes", says: str = "") -> None:
    MUTANTS[name] = Mutant(name, check, base, edits, says=says)


def _task(name: str, check: str, task: str, base: str = "classes", *, says: str = "", note: bool = False) -> None:
    MUTANTS[name] = Mutant(name, check, base, task=task, says=says, note=note)


def _config(name: str, check: str, *overrides: str, base: str = "classes") -> None:
    MUTANTS[name] = Mutant(name, check, base, overrides=overrides)


STEP, BEGIN, OPTIM = "core.step:exact_step", "core.step:_begin", "core.schedule:set_lr"
AVERAGE = "state.averages.update(state.step - state.skipped)"
MICRO_BATCH, FACTORS = "core.step:forward_backward_step", "core.step:_factors"
CALL_FACTORS = "factors, rest = _factors(state, losses, result.totals, micro_batch, fillers_count)"
AFTER_BACKWARD = "if metrics is not None and output is not None:"
RANK, WORLD = "int(__import__('os').environ['RANK'])", "int(__import__('os').environ['WORLD_SIZE'])"

# ---- loss: the training goes nowhere

_engine(
    "update with the wrong sign",
    "loss",
    (
        STEP,
        "result.applied = state.precision.step(state.optimizer)",
        "[p.grad.neg_() for p in state.parameters]; result.applied = state.precision.step(state.optimizer)",
    ),
)
_engine(
    "update never applied",
    "loss",
    (STEP, "result.applied = state.precision.step(state.optimizer)", "result.applied = True"),
)
_engine(
    "gradients zeroed before the update",
    "loss",
    (
        STEP,
        "result.applied = state.precision.step(state.optimizer)",
        "state.optimizer.zero_grad(set_to_none=True); result.applied = state.precision.step(state.optimizer)",
    ),
)
_engine(
    "optimizer over a copy of the model",
    "loss",
    ("core.run_model:make_optimizer", "build_optimizer(model,", "build_optimizer(__import__('copy').deepcopy(model),"),
    ("parts.checks.optimizer_check:check", "_check_parameters(optimizer, model)", "None"),  # it would end the run
)
_config(
    "learning rate far too high",
    "loss",
    "optim.name=SGD",
    "optim.weight_decay=0",
    "optim.lr=4000.0",
    "optim.clip_norm=null",
)
_engine(
    "weights restored before each step",
    "loss",
    (
        STEP,
        "state.step += 1\n",
        "state.step += 1\n"
        "state.__dict__.setdefault('first', [p.detach().clone() for p in state.parameters])\n"
        "[p.data.copy_(w) for p, w in zip(state.parameters, state.first)]\n",
    ),
)

# ---- metric: something is learned, but not what is evaluated

_task("labels rolled against inputs", "metric", "LabelsRolled")
_task("channels in another order in evaluation", "metric", "ChannelsSwapped")
_task("other class numbers in evaluation", "metric", "OtherClassNumbers")
_task("metric of the wrong target", "evaluation", "WrongTarget")
_task("mean over the metrics of batches", "evaluation", "MeanOfBatches")
_task("predictions from negated logits", "metric", "NegatedLogits")
_task("loss with the wrong sign", "metric", "Uphill")
_engine(
    "checkpoint's weights not loaded for evaluation",
    "metric",
    ("core.resume:load_trained_weights", "checkpoint_state.restore(", "(lambda *_, **__: None)("),
)
_engine("averages never updated", "metric", (STEP, AVERAGE, "pass"), base="ema")

# ---- overfit: not even eight samples

_task("labels drawn anew in each epoch", "metric", "LabelsDrawn")
_task("logits behind a closed gate", "overfit", "LogitsOff")
_task("inputs averaged over the batch", "overfit", "InputsAveraged")
_task("softmax over samples", "ranks", "SoftmaxOverSamples")
_config("learning rate a million times too small", "overfit", "optim.lr=2.0e-8")

# ---- gradients: what the optimizer gets

_engine("gradient divided by the world size", "gradients", (FACTORS, "state.world.data_size", "1"))
_engine(
    "gradient multiplied by the world size", "gradients", (FACTORS, "state.world.data_size", "state.world.data_size**2")
)
_engine(
    "loss summed twice",
    "gradients",
    ("core.step:_factors", "coefficients[head] * world", "2 * coefficients[head] * world"),
)
_engine(
    "coefficients applied twice",
    "gradients",
    ("core.step:_factors", "state.coefficients.get(head, 1.0)", "state.coefficients.get(head, 1.0) ** 2"),
    base="heads",
)
_engine(
    "coefficients ignored",
    "gradients",
    ("core.step:_factors", "state.coefficients.get(head, 1.0)", "1.0"),
    base="heads",
)
_engine(
    "one head's units for all heads",
    "gradients",
    ("core.step:_factors", "totals.get(head, totals.get(SAMPLES, 0.0))", "max(totals.values())"),
    base="heads",
)
_engine(
    "clipped before unscaling",
    "gradients",
    (STEP, "state.precision.scaler.unscale_(state.optimizer)", "pass"),
    (STEP, "result.applied =", "state.precision.scaler.unscale_(state.optimizer); result.applied ="),
    base="fp16",
)
_engine(
    "clipping left out",
    "gradients",
    (STEP, "clip_grads(parameters, state.clip_norm, result.grad_norm)", "pass"),
)
_engine(
    "clipped by value",
    "gradients",
    (
        STEP,
        "clip_grads(parameters, state.clip_norm, result.grad_norm)",
        "torch.nn.utils.clip_grad_value_(state.parameters, 0.05)",
    ),
)
_engine(
    "norm per parameter",
    "gradients",
    (
        "core.parallel.gradients:clip_grads",
        "nn.utils.clip_grads_with_norm_(held, max_norm, norm)",
        "[nn.utils.clip_grad_norm_([one], max_norm) for one in held]",
    ),
)
_engine("zero_grad forgotten", "gradients", (STEP, "state.optimizer.zero_grad(set_to_none=True)", "pass"))
_engine(
    "schedule counts micro-batches",
    "gradients",
    (
        BEGIN,
        "state.schedule(result.step - state.skipped)",
        "state.schedule((result.step - state.skipped) * len(result.indices))",
    ),
    base="micro-batches",
)
_engine(
    "schedule never advanced", "gradients", (BEGIN, "state.schedule(result.step - state.skipped)", "state.schedule(0)")
)
_engine(
    "schedule one update late",
    "gradients",
    (BEGIN, "state.schedule(result.step - state.skipped)", "state.schedule(max(0, result.step - state.skipped - 1))"),
)
_engine(
    "skipped updates advance the schedule",
    "gradients",
    (BEGIN, "state.schedule(result.step - state.skipped)", "state.schedule(result.step)"),
    base="overflow",
)
_config("warm-up that never ends", "gradients", "schedule.warmup_steps=40")
_task("torch seeded with the same number for every sample", "samples", "SeedsTorch")
_task("NumPy seeded with the same number for every sample", "samples", "SeedsNumpy")
_engine("warm-up ignored", "gradients", ("core.schedule:Schedule.__call__", "update < warmup", "False"))
_engine(
    "learning rate scaled twice",
    "gradients",
    ("core.run_model:make_optimizer", "scale=scale,", "scale=scale * scale,"),
)
_engine(
    "learning rate scaled by the number of ranks",
    "gradients",
    (
        BEGIN,
        "state.schedule(result.step - state.skipped)",
        "state.world.size * state.schedule(result.step - state.skipped)",
    ),
)
_engine(
    "schedule for half the steps",
    "gradients",
    ("core.build:_train_state", "config.schedule, total=stop,", "config.schedule, total=stop // 2,"),
)
_engine(
    "model left in evaluation mode by an evaluation",
    "gradients",
    (
        "core.loop:steps",
        "for micro_batches in batches:",
        "for micro_batches in batches:\n    state.forward.train(state.step < 6)",
    ),
)
_engine(
    "model in evaluation mode from the start",
    "gradients",
    ("core.loop:_Loop.begin", "state.forward.train()", "state.forward.eval()"),
    base="dropout",
)
_engine(
    "norm of the local shard",
    "gradients",
    ("core.parallel.gradients:grad_norm", "dist.all_reduce(square,", "(lambda *_, **__: None)(square,"),
    base="fsdp",
)
_engine(
    "modules put into training mode past the model's own train()",
    "gradients",
    (
        "core.loop:_Loop.begin",
        "state.forward.train()",
        "[setattr(one, 'training', True) for one in state.forward.modules()]",
    ),
    base="frozen-norm",
)
_task("dead branch", "gradients", "DeadBranch")
_task("detached body", "gradients", "DetachedBody", base="unused")
_task("dead units before a ReLU", "gradients", "DeadUnits")
_task("model put into evaluation mode by the loss", "gradients", "EvaluationMode")
_engine(
    "weight decay applied twice",
    "gradients",
    ("core.optim:_param_groups", "else optim.weight_decay", "else 30 * (optim.weight_decay or 0)"),
)
_engine(
    "optimizer arguments ignored",
    "gradients",
    ("core.optim:_default_optimizer", "optim.args, optim.fused", "{}, optim.fused"),
    base="momentum",
)
_engine(
    "parameter groups ignored",
    "gradients",
    ("core.optim:_param_groups", "_members(model, optim.groups)", "_members(model, [])"),
    base="groups",
)
_engine(
    "frozen parameters never thawed",
    "gradients",
    ("core.unfreeze:Unfreezing.apply", "step >= self._since[name]", "False"),
    base="unfreeze",
)
_engine(
    "frozen parameters trained from the start",
    "gradients",
    ("core.unfreeze:Unfreezing.apply", "step >= self._since[name]", "True"),
    base="unfreeze",
)
_engine(
    "averages updated twice per step",
    "gradients",
    (STEP, AVERAGE, f"{AVERAGE}; {AVERAGE}"),
    base="ema",
)

# ---- tensors that are read at once, and methods that are set on the object

AT_ONCE, CHUNKS = "core.data.loader:MicroBatches.__getitem__", "core.data.loader:MicroBatches.__init__"
_engine(
    "neighbouring rows read at once", "gradients", (AT_ONCE, "tensor[indices]", "tensor[indices - 1]"), base="tensors"
)
_engine(
    "first row read at once in the place of the last",
    "gradients",
    (AT_ONCE, "torch.tensor(plan.indices)", "torch.tensor((*plan.indices[:-1], plan.indices[0]))"),
    base="tensors",
)
_engine(
    "labels read at once in another order than inputs",
    "gradients",
    (AT_ONCE, "tensor[indices]", "tensor[indices if tensor.ndim > 1 else indices.sort().values]"),
    base="tensors",
)
_engine(
    "last tensor dropped where rows are read at once",
    "gradients",
    (AT_ONCE, "for tensor in self.data.tensors]", "for tensor in self.data.tensors[:2]]"),
    base="tensors",
)
_engine(
    "rows read at once in reversed order",
    "predictions",
    (AT_ONCE, "torch.tensor(plan.indices)", "torch.tensor(plan.indices).flip(0)"),
    base="tensors",
)
_engine(
    "rows of evaluation data read at once twice",
    "evaluation",
    (AT_ONCE, "tensor[indices]", "tensor[indices if self.training else indices // 2]"),
    base="tensors",
)
_engine(
    "methods on the object ignored",
    "gradients",
    (
        CHUNKS,
        "not is_default(task.prepare), not is_default(task.collate)",
        "(not hasattr(getattr(type(getattr(task, 'task', task)), one), 'default') for one in ('prepare', 'collate'))",
    ),
    base="on-the-object",
)
_engine(
    "collate on the object ignored",
    "gradients",
    (AT_ONCE, "self.task.collate(samples)", "type(self.task.task).collate(self.task.task, samples)"),
    base="on-the-object",
)

# ---- samples that are seeded only where they draw

SEEDING = "core.data.randomness:SampleSeeding.found_more"
_engine(
    "first micro-batch that draws not read again",
    "resume",
    (AT_ONCE, "if not self.seeding.found_more():", "if [self.seeding.found_more()]:"),
    base="rarely",
)
_engine(
    "samples that draw found, and not seeded",
    "gradients",
    (SEEDING, "self.drawn = tuple(generator for generator in GENERATORS if generator in drawn)", "pass"),
    (
        SEEDING,
        "tuple(generator for generator in GENERATORS if generator not in self.drawn)",
        "tuple(generator for generator in self._others if generator not in newly_drawn)",
    ),
    base="rarely",
)
_engine(
    "nobody looks for draws after a micro-batch without any",
    "determinism",
    (
        SEEDING,
        "if newly_drawn:",
        "self._others, self._seed = (self._others, self._seed) if newly_drawn else ((), None)\nif newly_drawn:",
    ),
    base="rarely",
)
_engine(
    "torch's generator seeded only where draws leave a trace",
    "gradients",
    ("core.data.randomness:SampleSeeding.__init__", "() if lazily else GENERATORS[:1]", "()"),
    base="forked",
)
_engine(
    "only torch's generator seeded for samples",
    "gradients",
    ("core.data.loader:MicroBatches._read_seeded", "in seeders:", "in seeders[:1]:"),
    base="rarely",
)

# ---- predictions: all alike, or somebody else's

_task("prediction of one class", "predictions", "OneClass")
_task("first output for the whole batch", "predictions", "FirstOfBatch")
_task("predictions from another model", "predictions", "FreshModel")
_task("every input blank", "predictions", "InputsBlank")
_task("probability shown as the class", "predictions", "ProbabilityAsClass")
_engine(
    "first output for all of a batch",
    "predictions",
    ("core.evaluate:split", "return list(output.detach().cpu())", "return [output.detach().cpu()[0]] * count"),
)
_engine(
    "outputs in the order of ranks, not of samples",
    "predictions",
    (
        "core.evaluate:predict",
        "return outputs if world.rank == 0 else None",
        "return outputs[::-1] if world.rank == 0 else None",
    ),
)
_engine(
    "prediction in training mode",
    "predictions",
    (
        "core.evaluate:predict_each",
        "output = forward(micro_batch.batch, task.predict)",
        "forward.train(); output = forward(micro_batch.batch, task.predict)",
    ),
    base="norm",
)

# ---- probe: ranks answer differently

_engine(
    "weights drawn per rank, and DDP's first broadcast skipped",
    "probe",
    ("core.run_model:build_model", "seed_everything(config)", f"seed_everything(config); torch.manual_seed({RANK})"),
    (
        "core.parallel.ddp:DDP.wrap",
        "static_graph=self.options.static_graph,",
        "static_graph=self.options.static_graph, init_sync=False,",
    ),
)
_engine(
    "gradients never reduced",
    "probe",
    (
        "core.parallel.ddp:DDP.gradient_sync",
        "contextlib.nullcontext() if last else self.forward.no_sync()",
        "self.forward.no_sync()",
    ),
)
_engine(
    "reduced on the first micro-batch only",
    "probe",
    (MICRO_BATCH, "strategy.gradient_sync(last)", "strategy.gradient_sync(number == 0)"),
    base="micro-batches",
)
_engine(
    "learning rate differs per rank",
    "probe",
    (OPTIM, 'group["base_lr"] * factor', f'group["base_lr"] * factor * (1 + {RANK} / 1000)'),
)
_engine(
    "BatchNorm statistics never synchronised",
    "probe",
    ("core.parallel.single:Single._sync_buffers", "self.world.broadcast_tensors(list(self._buffers))", "pass"),
    base="norm",
)
_engine(
    "BatchNorm statistics never synchronised under FSDP",
    "probe",
    ("core.parallel.single:Single._sync_buffers", "self.world.broadcast_tensors(list(self._buffers))", "pass"),
    base="fsdp-norm",
)

# ---- replicas: the same but for the last bits

_engine(
    "one rank drifts by 1e-7",
    "replicas",
    (
        STEP,
        "state.skipped += not result.applied",
        "state.skipped += not result.applied; "
        f"state.parameters[0].data.view(-1)[0] += 1e-7 * ({RANK} == 1 and state.step == 4)",
    ),
)
_engine(
    "averages on rank 0 only",
    "replicas",
    (STEP, "state.averages is not None and result.applied", "state.averages is not None and state.world.rank == 0"),
    base="ema",
)
_engine(
    "optimizer state differs per rank",
    "replicas",
    (
        STEP,
        "state.skipped += not result.applied",
        "state.skipped += not result.applied; "
        f"next(iter(state.optimizer.state.values()))['exp_avg'].view(-1)[-1] += 1e-9 * {RANK}",
    ),
)
_engine(
    "step counter of one rank's optimizer",
    "replicas",
    (
        STEP,
        "state.skipped += not result.applied",
        "state.skipped += not result.applied; "
        f"next(iter(state.optimizer.state.values()))['step'].add_({RANK} if state.step == 3 else 0)",
    ),
)
_engine(
    "clipped before the reduction, per rank",
    "replicas",
    (STEP, "result.applied =", f"state.parameters[-1].grad.mul_(1 + 1e-6 * {RANK}); result.applied ="),
)
_engine(
    "weight decay by hand on rank 0",
    "replicas",
    (
        STEP,
        "state.skipped += not result.applied",
        "state.skipped += not result.applied; [p.data.mul_(0.9999) for p in state.parameters if state.world.rank == 0]",
    ),
)

# ---- ranks: another model on two than on one

_engine(
    "each rank divides by its own weights",
    "ranks",
    ("core.step:_count_units", "state.world.sum_once(units)", "[max(1.0, one) * state.world.size for one in units]"),
    base="masked",
)
_engine(
    "units packed in the rank's own order of heads",
    "ranks",
    ("core.data.loader:_as_floats", "for head in sorted(named)}", "for head in named}"),
    (
        "core.step:_count_units",
        'heads.agree(state.weight_heads, names, method="Task.weight", world=state.world)',
        "names",
    ),
    base="heads-by-rank",
)
_engine(
    "logged losses packed in the rank's own order of heads",
    "ranks",
    ("core.parallel.strategy:by_head", "for head in sorted(heads)}", "for head in heads}"),
    ("core.heads:agree_on_losses", 'agree(None, tuple(losses), method="Task.loss", world=world)', "tuple(losses)"),
    ("core.log_window:_losses", "for head in result.totals.keys() - {SAMPLES}:", "for head in ():"),
    ("core.log_window:_losses", "for head in sorted(sums)}", "for head in sums}"),
    base="heads-by-rank",
)
_engine(
    "filler counted",
    "ranks",
    (FACTORS, "bool(units[head]) and (not micro_batch.filler or fillers_count)", "bool(units[head])"),
    base="few",
)
_engine(
    "filler's weight counted",
    "ranks",
    ("core.data.loader:_as_floats", "0.0 if filler else named[head]", "named[head]"),
    base="few-masked",
)
_engine(
    "augmentation seeded per rank",
    "ranks",
    (
        "core.data.loader:MicroBatches._read_seeded",
        "derive_seed(self.seed, epoch)",
        f"derive_seed(self.seed, epoch, {RANK})",
    ),
)
_engine(
    "order seeded with the world size",
    "ranks",
    ("core.data.order:StepPlan._block", "self.length, self.seed, epoch", "self.length, self.seed + self.world, epoch"),
)
_engine(
    "a rank drops its last micro-batch",
    "ranks",
    (
        MICRO_BATCH,
        CALL_FACTORS,
        f"{CALL_FACTORS}\nif last and state.world.rank == 1:\n"
        "    factors = {head: 0 * factor for head, factor in factors.items()}",
    ),
)
_engine(
    "initial weights depend on the world size",
    "ranks",
    ("core.run_model:build_model", "seed_everything(config)", "seed_everything(config); torch.manual_seed(world.size)"),
)
_engine(
    "a partial batch is divided by the full size",
    "gradients",
    ("core.step:_count_units", "return {SAMPLES: float(samples)}", "return {SAMPLES: 20.0}"),
)
_task("class numbers in the order of hashes", "ranks", "ClassesInHashOrder", says="order of a set")
_task("loss depends on the rank", "ranks", "PerRankLoss", says="Task.loss depends on the rank")
_task("samples influence each other", "ranks", "CoupledLoss")
_task(
    "outputs compared with the labels of all samples", "ranks", "OutputsAgainstAllLabels", says="influence each other"
)

# ---- accumulation: another model with several micro-batches

_engine(
    "gradient of the last micro-batch only",
    "accumulation",
    (MICRO_BATCH, AFTER_BACKWARD, f"last or state.forward.zero_grad()\n{AFTER_BACKWARD}"),
)
_engine(
    "mean of means over micro-batches",
    "accumulation",
    (
        MICRO_BATCH,
        "result.totals, micro_batch,",
        "{'': micro_batch.samples * state.world.size * len(result.indices)}, micro_batch,",
    ),
)
_engine(
    "divided by the number of micro-batches as well",
    "accumulation",
    (
        MICRO_BATCH,
        CALL_FACTORS,
        f"{CALL_FACTORS}\nfactors = {{head: factor / len(result.indices) for head, factor in factors.items()}}",
    ),
)
_engine(
    "clipped after each micro-batch",
    "accumulation",
    (
        MICRO_BATCH,
        AFTER_BACKWARD,
        "last or torch.nn.utils.clip_grad_norm_(state.parameters, state.clip_norm / len(result.indices))\n"
        + AFTER_BACKWARD,
    ),
)
_engine(
    "an update after each micro-batch",
    "accumulation",
    (
        MICRO_BATCH,
        AFTER_BACKWARD,
        f"last or (state.optimizer.step(), state.optimizer.zero_grad())\n{AFTER_BACKWARD}",
    ),
)
_engine(
    "one micro-batch twice",
    "accumulation",
    (
        STEP,
        "forward_backward_step(state, micro_batch, result",
        "forward_backward_step(state, micro_batches[max(0, number - (number == 2))], result",
    ),
)
_task("mean where a sum is asked for", "accumulation", "MeanLoss", says="must return a SUM")
_task("mean over valid targets of the micro-batch", "accumulation", "MaskedMean")
_task("mean over samples with their negatives", "accumulation", "MeanContrast", says="must return a SUM")
_task("mean over samples with their class", "accumulation", "MeanClassContrast", says="must return a SUM")
_task("mean over pairs of samples", "accumulation", "MeanOfPairs", says="must return a SUM")
_task("mean in one of two heads", "accumulation", "MeanOfOneHead", base="heads")
_task("weight that does not add up", "accumulation", "WeightIsShare", says="Task.weight must add up")
_task("weight of small batches rounded up", "accumulation", "WeightAtLeastFour", says="Task.weight")
_task("penalty once per micro-batch", "accumulation", "RegularisedPerBatch")

# ---- strategies: another model with shards than with replicas

_engine(
    "norm of the local shard under the other strategy",
    "strategies",
    ("core.parallel.gradients:grad_norm", "dist.all_reduce(square,", "(lambda *_, **__: None)(square,"),
)
_engine(
    "a row lost where shards are filled",
    "strategies",
    (
        "core.parallel.meta_init:_receive",
        "mine[first - rows.start : last - rows.start].copy_(own_columns(part[first - begin : last - begin], meta))",
        "mine.zero_()[first - rows.start : last - rows.start - 1].copy_(part[first - begin : last - begin - 1])",
    ),
)
_engine(
    "parameter groups lost under FSDP",
    "strategies",
    (
        "core.run_model:make_optimizer",
        "build_optimizer(model, optim,",
        "build_optimizer(model, optim.model_copy(update={'groups': []}) if sharded else optim,",
    ),
    base="groups",
)
_engine(
    "gradients of shards summed instead of averaged",
    "strategies",
    (FACTORS, "state.world.data_size", "state.world.data_size * (1 + state.strategy.is_sharded)"),
)
_engine(
    "shards drawn anew on each rank",
    "strategies",
    (
        "core.parallel.meta_init:materialise",
        "made: dict[int, tuple[Tensor, Tensor]] = {}",
        "made = {}; "
        "values = values and {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in values.items()}",
    ),
)
_engine(
    "clipping skipped for shards",
    "strategies",
    (
        "core.parallel.gradients:clip_grads",
        "nn.utils.clip_grads_with_norm_(held, max_norm, norm)",
        "hasattr(parameters[0], 'device_mesh') or nn.utils.clip_grads_with_norm_(held, max_norm, norm)",
    ),
)
_engine(
    "gather that misses a row",
    "strategies",
    (
        "core.checkpoint.saver:Saver._stage",
        "copy_(tensor, non_blocking=name in apart)",
        "copy_(tensor.roll(1, 0) if shards[name].writer else tensor)",
    ),
)

# ---- resume: another model after a kill

_engine(
    "optimizer state not restored",
    "resume",
    (
        "core.checkpoint.state:restore",
        "optimizer.state[parameter][slot] = like(value, parameter) if sharded else value",
        "pass",
    ),
)
_engine(
    "optimizer state not saved",
    "resume",
    ("core.checkpoint.state:capture", "in slots.items()}", "in slots.items() if 'exp' not in slot}"),
)
_engine(
    "optimizer's step counter not restored",
    "resume",
    (
        "core.checkpoint.state:restore",
        "on_host = slot ==",
        "tensor = torch.ones_like(tensor) if slot == 'step' else tensor; on_host = slot ==",
    ),
)
_engine(
    "schedule restarts",
    "resume",
    (
        BEGIN,
        "state.schedule(result.step - state.skipped)",
        "state.schedule(result.step - state.skipped - state.__dict__.setdefault('begun', result.step))",
    ),
)
_engine(
    "a step skipped",
    "resume",
    ("core.build:prepare_run", "start=step, stop=stop)", "start=step + (checkpoint is not None), stop=stop)"),
)
_engine(
    "a step repeated",
    "resume",
    ("core.build:prepare_run", "start=step, stop=stop)", "start=step - (checkpoint is not None), stop=stop)"),
)
_engine(
    "epoch begun anew",
    "resume",
    (
        "core.build:prepare_run",
        "start=step, stop=stop)",
        "start=step // plan.steps_per_epoch * plan.steps_per_epoch, stop=stop)",
    ),
)
_engine(
    "step counter one ahead",
    "resume",
    ("core.resume:restore", "= checkpoint.step, manifest", "= checkpoint.step + 1, manifest"),
)
_engine(
    "checkpoint one step late",
    "resume",
    ("core.resume:_manifest", '"step": state.step,', '"step": state.step - 1,'),
    ("core.resume:RunKeeper.save", "self.saver.save(state.step,", "self.saver.save(state.step - 1,"),
)
_engine(
    "dropout not a function of progress",
    "determinism",
    ("core.data.randomness:seed_forward", "seed_all(seed)", "pass"),
    base="dropout-workers",
)
_engine(
    "NumPy not seeded before a forward pass",
    "determinism",
    (
        "core.data.randomness:seed_forward",
        "seed_all(seed)",
        "torch.default_generator.manual_seed(seed); random.seed(seed)",
    ),
    base="mixed-in-loss",
)
_engine(
    "Python's random not seeded before a forward pass",
    "determinism",
    (
        "core.data.randomness:seed_forward",
        "seed_all(seed)",
        "torch.default_generator.manual_seed(seed); np.random.seed(seed & 0xFFFFFFFF)",
    ),
    base="mixed-in-loss-by-python",
)
_engine(
    "forward passes seeded by the steps of this process",
    "resume",
    (
        "core.step:seed_of",
        "derive_seed(state.seed, step,",
        "derive_seed(state.seed, state.__dict__.setdefault('count', []).append(0) or len(state.count),",
    ),
    base="dropout",
)
_engine(
    "collate not seeded",
    "determinism",
    (AT_ONCE, "if self.collates:", "if False:"),
    (AT_ONCE, "self.seeding.begin(derive_seed(self.seed, plan.epoch))", "pass"),
    (AT_ONCE, "if not self.seeding.found_more():", "if True:"),
    base="mixed-in-collate",
)
_engine(
    "collate seeded by the batches of this process",
    "resume",
    (
        AT_ONCE,
        "plan.words[0], _COLLATE",
        "self.__dict__.setdefault('count', []).append(0) or len(self.count), _COLLATE",
    ),
    base="mixed-in-collate",
)
_engine(
    "averages not saved",
    "resume",
    ("core.checkpoint.state:capture", "(averages or {}).items()", "{}.items()"),
    base="ema",
)
_engine(
    "averages not restored",
    "resume",
    ("core.checkpoint.state:restore", "local(averages[rest]).copy_(own_columns(tensor, averages[rest]))", "pass"),
    base="ema",
)
_engine(
    "loss scale not restored",
    "resume",
    ("core.resume:restore", 'state.precision.load(manifest["loss_scale"])', "pass"),
    base="overflow",
)
_engine(
    "number of skipped updates not restored",
    "resume",
    ("core.resume:restore", 'manifest["skipped"]', "0"),
    base="overflow",
)
_engine(
    "asynchronous save without a copy",
    "resume",
    ("core.checkpoint.saver:Saver._stage", "local=self.buffers[name])", "local=shard.local)"),
    ("core.checkpoint.saver:Saver._write", "not_finite = finite", "time.sleep(0.3); not_finite = finite"),
)
_engine(
    "rank 0's shard only",
    "resume",
    ("core.checkpoint.saver:Saver._stage", "if shard.writer}", "if shard.writer and self.world.rank == 0}"),
    base="fsdp",
)
_engine(
    "rank 0 alone restored",
    "resume",
    (
        "core.resume:restore",
        "checkpoint_state.restore(",
        "state.world.rank == 0 and checkpoint_state.restore(",
    ),
)
_engine(
    "augmentation seeded by the steps of this process",
    "resume",
    (
        "core.data.loader:MicroBatches._read_seeded",
        "seed_generator(seed)",
        "seed_generator(derive_seed(self.seed, self.__dict__.setdefault('count', []).append(0) or len(self.count)))",
    ),
)
_engine(
    "momentum not restored",
    "resume",
    (
        "core.checkpoint.state:restore",
        "optimizer.state[parameter][slot] = like(value, parameter) if sharded else value",
        "pass",
    ),
    base="momentum",
)

_engine(
    "a pass beside the training that changes the model",
    "resume",
    ("core.parallel.single:Single.pass_of_zeros", 'with restored_state(self.unwrapped, "zeros"):', "if True:"),
    base="following",
)

# ---- elastic: another model after a change of the world size

_engine(
    "optimizer state dropped on another number of ranks",
    "elastic",
    (
        "core.resume:restore",
        "== _kind_of_optimizer(config, state.optimizer) else None",
        "== _kind_of_optimizer(config, state.optimizer) "
        "and manifest['versions']['world'] == state.world.size else None",
    ),
)
_engine(
    "position counted per rank",
    "elastic",
    (
        "core.build:prepare_run",
        "start=step, stop=stop)",
        "start=step * checkpoint.manifest['versions']['world'] // world.size if checkpoint else step, stop=stop)",
    ),
)
_engine(
    "learning rate follows the number of ranks",
    "elastic",
    (
        "core.build:prepare_run",
        "loader = make_loader(",
        "then = checkpoint.manifest['versions']['world'] if checkpoint else world.size; "
        "state.coefficients = {'loss': world.size / then}; loader = make_loader(",
    ),
)
_engine(
    "order seeded anew on another number of ranks",
    "elastic",
    (
        "core.build:prepare_run",
        "StepIterator(loader, plan,",
        "StepIterator(loader, plan if checkpoint is None else __import__('dataclasses').replace("
        "plan, seed=plan.seed + world.size - checkpoint.manifest['versions']['world'], _cached=None),",
    ),
)
_engine(
    "only rank 0's own rows read back",
    "elastic",
    (
        "core.checkpoint.state:restore",
        "_placed(tensor, parameter)",
        "_placed(tensor, parameter)\n"
        f"if value.ndim and {WORLD} == 1:\n"
        "    value = torch.cat([value[: len(value) // 2], value[: len(value) - len(value) // 2]])",
    ),
    base="fsdp",
)
_engine(
    "BatchNorm statistics summed over ranks on resuming",
    "elastic",
    (
        "core.checkpoint.state:_load_tensor",
        "local(target).copy_(own_columns(tensor, target))",
        f"local(target).copy_(tensor if tensor.ndim != 1 or {WORLD} > 1 "
        "or name.endswith('weight') else tensor * 1.001)",
    ),
    base="norm",
)

# ---- samples: lost, repeated, shared

_task("data set drawn by each rank", "samples", "DataOfEachRank", says="the ranks have different training data")
_engine(
    "tail repeated to fill the last batch",
    "samples",
    (
        "core.data.order:StepPlan.drawn",
        "return order[start - first * size : stop - first * size], epoch",
        "return np.resize(order[start - first * size : stop - first * size], "
        "min(self.global_batch, self.length)), epoch",
    ),
    (
        "core.data.order:StepPlan.samples",
        "min(self.global_batch, self.length - start)",
        "min(self.global_batch, self.length)",
    ),
)
_engine(
    "tail dropped",
    "samples",
    (
        "core.data.order:StepPlan.steps_per_epoch",
        "-(-self.length // self.global_batch)",
        "max(1, self.length // self.global_batch)",
    ),
)
_engine(
    "same order in every epoch",
    "samples",
    ("core.data.order:StepPlan._block", "self.length, self.seed, epoch)", "self.length, self.seed, 0)"),
)
_engine(
    "no shuffling",
    "samples",
    ("core.data.order:StepPlan._block", "permute(places, self.length, self.seed, epoch)", "places.copy()"),
)
_engine(
    "order drawn per rank",
    "samples",
    ("core.data.order:StepPlan._block", "self.length, self.seed, epoch", f"self.length, self.seed + {RANK}, epoch"),
)
_engine(
    "one sample of a sorted window lost",
    "samples",
    (
        "core.data.order:group",
        'np.argsort(lengths[:whole], kind="stable")',
        'np.maximum(np.argsort(lengths[:whole], kind="stable"), 1)',
    ),
    base="grouped",
)
_engine(
    "batches of a sorted window not shuffled",
    "samples",
    ("core.data.order:group", "by_length[permute(np.arange(batches), batches, seed, window)]", "by_length"),
    base="grouped",
)
_engine(
    "lengths of other samples sort a window",
    "samples",
    ("core.data.order:StepPlan._block", "self._lengths_of(order)", "self._lengths_of(places)"),
    base="grouped",
)
_engine(
    "samples not grouped by length",
    "samples",
    ("core.run_data:step_plan", "grouped, drop_last = config.data.group_by_length", "grouped, drop_last = None"),
    base="grouped",
)
DRAWS = "core.data.order:StepPlan._block", "self.order(places, seed=self.seed, epoch=epoch)"
_engine("samples drawn per rank", "samples", (*DRAWS, f"self.order(places, seed={RANK}, epoch=epoch)"), base="weighted")
_engine(
    "the same draws in every epoch", "samples", (*DRAWS, "self.order(places, seed=self.seed, epoch=0)"), base="balanced"
)
_engine(
    "an order of one's own asked for the positions of the step alone",
    "samples",
    (*DRAWS, "self.order(places % self.global_batch, seed=self.seed, epoch=epoch)"),
    base="own-order",
)
_engine(
    "every sample drawn as often",
    "samples",
    (
        "sampling.weighted:WeightedSampler.__call__",
        "self._cumulative, places",
        "np.linspace(0, self._cumulative[-1], 1 + len(self.weights))[1:], places",
    ),
    base="weighted",
)
_engine(
    "a sample that is drawn twice augmented once",
    "gradients",
    ("core.data.loader:MicroBatches._read_seeded", "plan.words", "plan.indices"),
    base="weighted",
)
_engine(
    "all ranks read rank 0's share",
    "samples",
    ("core.data.order:split_for_rank", "number = turn * world + place", "number = turn * world"),
)
_engine(
    "shares overlap by one sample",
    "samples",
    (
        "core.data.order:split_for_rank",
        "indices[start : start + size + (number < extra)]",
        "indices[max(0, start - 1) : start + size + (number < extra)]",
    ),
)
_engine(
    "last sample of a share dropped",
    "samples",
    (
        "core.data.order:split_for_rank",
        "indices[start : start + size + (number < extra)]",
        "indices[start : start + max(1, size + (number < extra) - 1)]",
    ),
)
_engine(
    "each sample of odd number read as its neighbour",
    "gradients",
    ("core.data.loader:MicroBatches._read_seeded", "data[index]", "data[index // 2 * 2]"),
)
_engine(
    "neighbours where the data set reads many at once",
    "gradients",
    (
        "core.data.loader:MicroBatches._read",
        "self.read_many(list(plan.indices))",
        "self.read_many([index - 1 for index in plan.indices])",
    ),
    base="many",
)
_engine(
    "partial batches kept where they are to be dropped",
    "samples",
    (
        "core.run_data:step_plan",
        "= config.data.group_by_length, config.data.drop_last",
        "= None, False",
    ),
    base="drop-last",
)
_engine(
    "every epoch prepared as the first",
    "gradients",
    (
        "core.data.loader:MicroBatches._read_seeded",
        "derive_seed(self.seed, epoch)",
        "derive_seed(self.seed, 0)",
    ),
)
_engine(
    "training samples prepared as for evaluation",
    "gradients",
    ("core.data.loader:MicroBatches._read_seeded", "epoch, training)", "epoch, False)"),
)

# ---- evaluation: another number than one plain loop gives

_engine(
    "duplicates in the last batch",
    "evaluation",
    ("core.evaluate:_Tally.add", "if micro_batch.filler:\n        return", "micro_batch.filler = False"),
)
_engine(
    "partial last batch dropped",
    "evaluation",
    (
        "core.data.order:EvaluationPlan._micro_batches",
        "range(0, self.count, self.micro_batch)]",
        "range(0, self.count - self.micro_batch + 1, self.micro_batch)]",
    ),
)
_engine(
    "mean of the ranks' means",
    "evaluation",
    (
        "core.evaluate:_Tally.results",
        "world.broadcast(_means(losses, task.coefficients))",
        "dict(zip(['loss'], "
        "[one / world.size for one in world.all_sum([_means([parts], task.coefficients).get('loss', 0.0)])]))",
    ),
)
_engine(
    "mean of the batches' means",
    "evaluation",
    (
        "core.evaluate:_means",
        "units[head] = units.get(head, 0.0) + weights[head]",
        "units[head] = units.get(head, 0.0) + 1; sums[head] += value / weights[head] - value",
    ),
)
_engine(
    "random numbers of an evaluation not seeded",
    "evaluation",
    (
        "core.evaluate:_micro_batches",
        "seed_forward(seed, world.device)",
        "pass",
    ),
    base="mixed-in-loss",
)
_engine(
    "rank 0's metric states only",
    "evaluation",
    ("core.metric_sync:compute", "merge(metrics, gathered)", "merge(metrics, gathered[:1])"),
)
_engine(
    "evaluation in training mode",
    "evaluation",
    ("core.evaluate:_micro_batches", "forward.eval()", "forward.train()"),
    base="dropout",
)
_engine(
    "augmented evaluation samples", "evaluation", ("core.run_data:evaluation_data", "training=False", "training=True")
)
_engine("a rank evaluates another's share", "evaluation", ("core.evaluate:_micro_batches", "[world.data_rank]", "[0]"))
_engine(
    "metrics not reset",
    "evaluation",
    (
        "core.evaluate:_Tally.add",
        "self.update(metrics, output, micro_batch.batch)",
        "[self.update(metrics, output, micro_batch.batch) for _ in range(1 + (micro_batch.indices[0] == 0))]",
    ),
)
_engine(
    "weights read inexactly on several ranks",
    "evaluation",
    (
        "core.resume:load_trained_weights",
        "checkpoint_state.restore(tensors, checkpoint.values, model, averages=averages, device=world.device)",
        f"checkpoint_state.restore(((n, t * (1 + 1e-3 * ({WORLD} - 1))) for n, t in tensors), "
        "checkpoint.values, model, averages=averages, device=world.device)",
    ),
)

# ---- collectives: more talk than needed

_engine(
    "reduced after every micro-batch",
    "collectives",
    (MICRO_BATCH, "strategy.gradient_sync(last)", "strategy.gradient_sync(True)"),
)
_engine(
    "reduced after every micro-batch under FSDP",
    "collectives",
    (MICRO_BATCH, "strategy.gradient_sync(last)", "strategy.gradient_sync(True)"),
    base="fsdp",
)
_engine(
    "loss read in every step",
    "collectives",
    (MICRO_BATCH, AFTER_BACKWARD, f"sum(value.item() for value in losses.values())\n{AFTER_BACKWARD}"),
)
_engine(
    "norm read in every step",
    "collectives",
    (STEP, "result.applied =", "float(result.grad_norm) > 1e9 and print('large'); result.applied ="),
)
_engine(
    "gradients reduced once more",
    "collectives",
    (
        STEP,
        "state.precision.scaler.unscale_(state.optimizer)",
        "state.precision.scaler.unscale_(state.optimizer); "
        "[state.world.all_sum(p.grad.flatten().tolist()) for p in state.parameters]",
    ),
)
_engine(
    "units counted for each micro-batch",
    "collectives",
    (
        STEP,
        "state.step += 1\n",
        "state.step += 1; [_count_units(state, [micro], samples) for micro in micro_batches]\n",
    ),
    base="masked",
)
_engine(
    "loss averaged over ranks in every step",
    "collectives",
    (
        MICRO_BATCH,
        AFTER_BACKWARD,
        "[__import__('torch').distributed.all_reduce(value.detach().clone()) for value in losses.values()]\n"
        + AFTER_BACKWARD,
    ),
)
_engine(
    "a barrier in every step",
    "collectives",
    (
        STEP,
        "state.precision.scaler.unscale_(state.optimizer)",
        "state.precision.scaler.unscale_(state.optimizer); state.world.size > 1 and torch.distributed.barrier()",
    ),
)
_engine(
    "losses gathered as objects in every step",
    "collectives",
    (BEGIN, "set_lr(state.optimizer, state", "state.world.gather(result.indices); set_lr(state.optimizer, state"),
)
_engine(
    "weights broadcast in every step",
    "collectives",
    (
        BEGIN,
        "set_lr(state.optimizer, state",
        "state.world.broadcast_tensors([p.detach() for p in state.parameters]); set_lr(state.optimizer, state",
    ),
)

# ---- determinism: another result the second time

_task("noise from the operating system in the loss", "determinism", "NoisyLoss", says="the loss of the same batch is")
_task("loss depends on the clock", "determinism", "ReadsLoss")
_task("augmentation from default_rng()", "determinism", "FreshGenerator")
_task("augmentation seeded with the clock", "determinism", "TimedNoise")
_engine(
    "dropout seeded with the clock",
    "determinism",
    (
        "core.step:seed_of",
        "derive_seed(state.seed,",
        "derive_seed(__import__('time').perf_counter_ns(),",
    ),
    base="dropout",
)
_engine(
    "optimizer with noise in the last bits",
    "determinism",
    (
        STEP,
        "state.skipped += not result.applied",
        "state.skipped += not result.applied; "
        "[p.data.mul_(state.world.broadcast(1 + int.from_bytes(__import__('os').urandom(1)) * 1e-7)) "
        "for p in state.parameters]",
    ),
)
_engine(
    "samples seeded per process",
    "determinism",
    (
        "core.data.loader:MicroBatches._read_seeded",
        "derive_seed(self.seed, epoch)",
        "derive_seed(self.seed, epoch, id(self))",
    ),
    base="workers",
)
_engine(
    "order seeded with the clock",
    "determinism",
    (
        "core.run_data:step_plan",
        "*sizes, config.seed,",
        "*sizes, world.broadcast(__import__('time').perf_counter_ns()),",
    ),
)
_task("augmentation from one generator of the task", "resume", "OneGenerator")

# ---- what the checks did not look at before

_engine(
    "same dropout masks in every step and on every rank",
    "determinism",
    ("core.step:seed_of", "derive_seed(state.seed, step, state.world.data_rank, number)", "derive_seed(state.seed)"),
    base="dropout",
    says="same random numbers",
)
_engine(
    "same dropout masks on every rank",
    "determinism",
    (
        "core.step:seed_of",
        "derive_seed(state.seed, step, state.world.data_rank, number)",
        "derive_seed(state.seed, step)",
    ),
    base="dropout",
    says="same random numbers",
)
_engine(
    "raw weights stored as averages",
    "resume",
    (
        "core.checkpoint.state:capture",
        'state |= {f"ema.{name}": value for name, value in (averages or {}).items()}',
        'state |= {f"ema.{name}": dict(model.named_parameters())[name] for name in averages or ()}',
    ),
    base="ema",
    says="differs from the state after",
)
_engine(
    "live tensors saved",
    "resume",
    ("core.checkpoint.saver:Saver._stage", "local=self.buffers[name])", "local=shard.local)"),
    says="differs from the state after",
)
_engine(
    "loss of the last step logged for all steps of a window",
    "resume",
    ("core.log_window:LogWindow.entry", "_losses(self.results)", "_losses(self.results[-1:])"),
    says="logged",
)
_engine(
    "filler counted at the end of an epoch",
    "ranks",
    (FACTORS, "bool(units[head]) and (not micro_batch.filler or fillers_count)", "bool(units[head])"),
)
_engine(
    "filler's weight counted at the end of an epoch",
    "ranks",
    ("core.data.loader:_as_floats", "0.0 if filler else named[head]", "named[head]"),
    base="masked",
)
_engine(
    "predictions of a turn in the reversed order of ranks",
    "predictions",
    (
        "core.evaluate:predict_each",
        "world.gather_once((indices, finished, micro_batch.bad)) or ()",
        "(world.gather_once((indices, finished, micro_batch.bad)) or [])[::-1]",
    ),
    (
        "core.evaluate:predict_each",
        "zip(numbers, split(values, len(numbers)), strict=True)",
        "zip(range(expected + len(waiting), 1 << 30), split(values, len(numbers)))",
    ),
    base="wide",
)
EVALUATION_PLAN = "core.data.order:EvaluationPlan._micro_batches"
_engine(
    "last sample of each micro-batch evaluated twice",
    "evaluation",
    (
        EVALUATION_PLAN,
        "order[start : start + self.micro_batch]",
        "order[max(0, start - 1) : start + self.micro_batch]",
    ),
)
_engine(
    "last sample of each micro-batch evaluated twice, where the evaluation draws random numbers",
    "evaluation",
    (
        EVALUATION_PLAN,
        "order[start : start + self.micro_batch]",
        "order[max(0, start - 1) : start + self.micro_batch]",
    ),
    base="mixed-in-loss",
)
_engine(
    "one sample evaluated in the place of another, where the evaluation draws random numbers",
    "evaluation",
    (EVALUATION_PLAN, "micros = [tuple(order", "order[-1] = order[0]\nmicros = [tuple(order"),
    base="mixed-in-loss",
)
_task(
    "noise from the operating system in evaluation",
    "predictions",
    "NoisyInEvaluation",
    says="the same batch gives different results",
)
_task("dropout in evaluation by mistake", "evaluation", "DropoutInEvaluation", says="in evaluation mode", note=True)
_task("model seeded with the clock", "determinism", "ClockSeededModel", says="initial weights")
_task("model whose mode depends on the clock", "determinism", "ModeByClock", says="body.scale")
_engine(
    "weights drawn per rank",
    "replicas",
    ("core.run_model:build_model", "seed_everything(config)", f"seed_everything(config); torch.manual_seed({RANK})"),
    (
        "core.parallel.ddp:DDP.wrap",
        "static_graph=self.options.static_graph,",
        "static_graph=self.options.static_graph, init_sync=False,",
    ),
    says="do not hold the same parameters",
)
_task("a branch of the model on rank 0 alone", "ranks", "BranchOnFirstRank", base="unused", says="depends on the rank")
_task(
    "a branch of the model on rank 0 of the group alone",
    "ranks",
    "BranchOnFirstRankOfGroup",
    base="unused",
    says="depends on the rank",
)
_task("padding counted by the weight", "gradients", "PaddingCounted", base="tokens", says="Task.weight", note=True)
_task("evaluation data among the training data", "metric", "EvaluatesTraining", says="training data", note=True)
_task("label among the inputs", "metric", "LabelAmongInputs", says="label", note=True)
_task("backward pass of a function of one's own is wrong", "gradients", "WrongBackward", says="derivative", note=True)


# By name: why no check finds the fault, and what a check would have to look at.
SURVIVORS: dict[str, str] = {}


# ---- running them


def mutated(name: str, function: Any, *arguments: Any) -> Any:
    """For `command.verify(wrap=...)`: call the function on this rank with the edits of a mutant."""
    from lockstep_lab.verify import worker_functions

    with broken(MUTANTS[name]):
        return worker_functions.answering(function, *arguments)


@contextlib.contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Inside, the engine of this process has the edits of the mutant."""
    before: dict[FunctionType, CodeType] = {}
    try:
        for target in dict.fromkeys(target for target, _, _ in mutant.edits):
            function = _function(target)
            before[function] = function.__code__
            function.__code__ = _edited(function, [(old, new) for at, old, new in mutant.edits if at == target])
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _function(target: str) -> FunctionType:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(f"lockstep.{module}")
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else found
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), target
    return function


@functools.cache
def _source(function: FunctionType) -> str:
    return inspect.getsource(function)


def _edited(function: FunctionType, edits: Sequence[tuple[str, str]]) -> CodeType:
    """The code of a function after replacing texts, each of which it must hold once. Lines keep their numbers.

    Texts are compared token by token, so that a formatter may break lines, add trailing commas and change quotes.
    """
    text = "\n" * (function.__code__.co_firstlineno - 1) + textwrap.dedent(_edited_source(function, edits))
    compiled = compile(text, function.__code__.co_filename, "exec", flags=annotations.compiler_flag, dont_inherit=True)
    return next(
        constant
        for constant in compiled.co_consts
        if isinstance(constant, CodeType) and constant.co_name == function.__name__
    )


def _edited_source(function: FunctionType, edits: Sequence[tuple[str, str]]) -> str:
    source = _source(function)
    for old, new in edits:
        places = _places(source, old)
        assert len(places) == 1, f"{function.__qualname__} holds {old!r} {len(places)} times"
        start, stop = places[0]
        line = source[:start].rpartition("\n")[2]
        indent = " " * (len(line) - len(line.lstrip())) if line.strip() else line
        source = source[:start] + new.strip("\n").replace("\n", f"\n{indent}") + source[stop:]
    return source


def edited_sources(mutant: Mutant) -> list[tuple[Path, str, str]]:
    """For each function that a mutant edits: its file, its source, and its source after the edits."""
    by_function: dict[FunctionType, list[tuple[str, str]]] = {}
    for target, old, new in mutant.edits:
        by_function.setdefault(_function(target), []).append((old, new))
    return [
        (Path(inspect.getfile(function)), _source(function), _edited_source(function, edits))
        for function, edits in by_function.items()
    ]


_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* |
    (?P<token> [A-Za-z]{0,2}(?:\"{3}.*?\"{3} | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*') | \w+ | . )""",
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str) -> list[tuple[str, int, int]]:
    """(token, start, stop) of a piece of Python. Trailing commas are left out, and all quotes are double."""
    found = [(m["token"], *m.span()) for m in _TOKEN.finditer(text) if m["token"]]
    followed = zip(found, [*found[1:], ("", 0, 0)], strict=True)
    kept = [token for token, after in followed if not (token[0] == "," and after[0] in (")", "]", "}", ""))]
    return [(token.replace("'", '"') if token[-1] == "'" else token, start, stop) for token, start, stop in kept]


def _places(source: str, text: str) -> list[tuple[int, int]]:
    """Where `source` holds the tokens of `text`."""
    held, wanted = _tokens(source), [token for token, _, _ in _tokens(text)]
    names = [token for token, _, _ in held]
    firsts = [n for n in range(len(names) - len(wanted) + 1) if names[n : n + len(wanted)] == wanted]
    places = [(held[n][1], held[n + len(wanted) - 1][2]) for n in firsts]
    if text.rstrip().endswith(","):  # the comma belongs to the text, also where it is a trailing one
        comma = re.compile(r"\s*,")
        places = [(start, match.end() if (match := comma.match(source, stop)) else stop) for start, stop in places]
    return places


def config_of(base: str, task: str | None = None, overrides: Sequence[str] = (), nproc: int = 2) -> dict[str, Any]:
    """The config of a base, as `command.verify` takes it."""
    from lockstep.configs import config_file

    file, *keys = arguments(Mutant(base, "", base, task=task, overrides=tuple(overrides)))
    settings = config_file.load(file, keys)
    return settings.model_copy(update={"batch": settings.batch.resolve(nproc)}).model_dump(by_alias=True)


def arguments(mutant: Mutant) -> list[str]:
    """The task and the keys of the config, as the command line takes them."""
    kind, *own = BASES[mutant.base]
    return [
        f"{TASKS}:{mutant.task or kind}",
        *_last_of([*COMMON, *own, *mutant.overrides]),
        f"name={mutant.base}",
    ]


def _last_of(overrides: Sequence[str]) -> list[str]:
    return list({one.partition("=")[0]: one for one in overrides}.values())


@dataclass
class Outcome:
    """What verify said of a training."""

    checks: dict[str, Any]
    """The results, by check."""
    seconds: float
    error: str = ""

    @property
    def faults(self) -> list[str]:
        return [name for name, check in self.checks.items() if check.status == "fault"]


def verify_base(
    base: str, ranks: Any, folder: Path, checks: Sequence[str] = (), nproc: int = 2, steps: int = 8
) -> Outcome:
    """What verify says of a base as it is."""
    from lockstep_lab.verify import worker_functions

    return _verify(config_of(base, nproc=nproc), worker_functions.answering, ranks, folder, checks, nproc, steps)


def verify_mutant(
    name: str, ranks: Any, folder: Path, checks: Sequence[str] = (), nproc: int = 2, steps: int = 8
) -> Outcome:
    """What verify says of a mutant. checks: names of checks; empty: all."""
    mutant = MUTANTS[name]
    config = config_of(mutant.base, mutant.task, mutant.overrides, nproc)
    return _verify(config, functools.partial(mutated, name), ranks, folder, checks, nproc, steps)


def _verify(
    config: dict[str, Any], wrap: Any, ranks: Any, folder: Path, checks: Sequence[str], nproc: int, steps: int
) -> Outcome:
    from lockstep.core.errors import LockstepError
    from lockstep_lab.verify import command

    begun = time.perf_counter()
    try:
        result = command.verify(
            config,
            nproc,
            folder,
            checks=checks,
            quick=True,
            steps=steps,
            tell=lambda line: None,
            wrap=wrap,
            workers=ranks,
        )
        return Outcome({check.name: check for check in result.checks}, time.perf_counter() - begun)
    except LockstepError as error:
        return Outcome({}, time.perf_counter() - begun, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
