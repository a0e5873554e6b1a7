"""The task of a transformers model with its data sets, collator and TrainingArguments."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.core.config.sections import RunConfig
from lockstep.core.data.randomness import restored_generators, seed_all
from lockstep.core.errors import UsageError
from lockstep.core.foreign_task import Foreign, Keys, line_of, refused
from lockstep.core.parallel.wrapped_model import inside_compiled, without_wrappers
from lockstep.core.schedule import scaled_lr
from lockstep.core.task import Metrics
from lockstep_recipes.adapters import transformers_arguments, units
from lockstep_recipes.adapters.loaders import Marked, Validated, reads_at_once
from lockstep_recipes.adapters.optimizers import LearningRateFactors, holder
from lockstep_recipes.adapters.units import Given

_CPU = torch.device("cpu")
_TAKEN = (
    "model",
    "args",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "processing_class",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "model_init",
    "weight",
)


class TransformersTask(Foreign):
    """See `lockstep_recipes.adapters.transformers`. A batch is a `Given`: the collator's batch, and its samples."""

    def __init__(
        self,
        model: nn.Module | None,
        args: Any,
        *,
        model_init: Callable[[], nn.Module] | None,
        train_dataset: Any,
        eval_dataset: Any,
        data_collator: Callable[[list[Any]], Any] | None,
        processing_class: Any,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None,
        preprocess: Callable[[Any, Any], Any] | None,
        weight: Any,
        further: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.arguments, notes = transformers_arguments.understood(args)
        self.notes += notes + transformers_arguments.check_further(further, self.arguments, _TAKEN)
        if (model is None) == (model_init is None):
            remedy = "give model=, or model_init=, a function that makes it"
            raise UsageError("give one of the two", where="adapters.transformers(model, model_init)", remedy=remedy)
        if model is not None and not hasattr(model, "config"):
            remedy = "give a transformers model, with a `config`; for others write a Task: lockstep --explain tasks"
            raise UsageError(f"the model is a {type(model).__name__}", where="adapters.transformers", remedy=remedy)
        _check_sets(train_dataset, eval_dataset)
        self.made_model, self.model_init, self.processing_class = model, model_init, processing_class
        sets = (Marked(one) if reads_at_once(one) else one for one in (train_dataset, eval_dataset))
        self.sets, self.compute_metrics, self.given_weight = tuple(sets), compute_metrics, weight
        self.preprocess = preprocess
        self.collator = data_collator if data_collator is not None else self._default_collator()
        self._made: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps, self._lr = 1, float(self.arguments.learning_rate)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_made", "_rates")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _made=weakref.WeakSet())

    @property
    def foreign(self) -> Any:
        """The model."""
        return self._pristine

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        import transformers

        if self.processing_class is not None and hasattr(self.processing_class, "pad"):
            return transformers.DataCollatorWithPadding(self.processing_class)
        return transformers.default_data_collator

    def configured(self, config: RunConfig) -> None:
        size, length = config.batch.global_ or 32, len(self.sets[0])
        per_epoch = max(1, length // size if config.data.drop_last else -(-length // size))
        train = config.train
        steps = train.steps or max((train.epochs or 1) * per_epoch, train.min_steps or 0)
        self._steps = config.schedule.total_steps or steps
        optim = config.optim
        self._lr = scaled_lr(optim.lr, optim.lr_scaling, global_batch=size, reference_batch=optim.reference_batch)
        vars(self).pop("_rates", None)

    @functools.cached_property
    def implied(self) -> Keys:  # type: ignore[override]
        """See `Foreign.implied`."""
        return transformers_arguments.keys_of(self.arguments, len(self.sets[0]), evaluates=self.sets[1] is not None)

    # ---- the model, its optimizer and its schedule

    @functools.cached_property
    def _pristine(self) -> Any:
        """A model that is never trained."""
        if self.made_model is not None:
            return inside_compiled(self.made_model)
        assert self.model_init is not None
        with torch.device("cpu"), restored_generators(_CPU):
            return inside_compiled(self.model_init())

    def model(self) -> nn.Module:
        made: Any = self.model_init() if self.model_init is not None else copy.deepcopy(self.made_model)
        made = without_wrappers(made, "adapters.transformers(model)")
        self._made.add(made)
        self._unit  # noqa: B018 - found before workers and a meta device are there
        return made  # type: ignore[no-any-return]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        args, ours = self.arguments, {id(one): group for group in groups for one in group["params"]}
        module = holder(self._made, groups, lambda: copy.deepcopy(self._pristine))
        decaying = _decaying(module)
        made: dict[tuple[str, bool], dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            group, decays = ours[id(parameter)], name in decaying
            key = (group["name"], decays)
            if key not in made:
                options = {**group, "params": [], "name": group["name"] + ("" if decays else "/no_decay")}
                decay = options.get("weight_decay", args.weight_decay)
                made[key] = options | {"weight_decay": decay if decays else 0.0}
            made[key]["params"].append(parameter)
        kind: Any = getattr(torch.optim, transformers_arguments.OPTIMIZERS[args.optim])
        more = (
            {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            if kind is not torch.optim.SGD
            else {}
        )
        found: torch.optim.Optimizer = kind(list(made.values()), lr=args.learning_rate, **more)
        return found

    def schedule(self, update: int) -> float:
        return self._rates.at(update, 1)

    @functools.cached_property
    def _rates(self) -> LearningRateFactors:
        from transformers import get_scheduler

        args = self.arguments
        warmup = args.warmup_steps or args.warmup_ratio or 0
        steps = int(warmup) if warmup >= 1 else math.ceil(self._steps * warmup)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self._lr)  # min_lr and lr_end are rates
        optimizer.param_groups[0]["lr"] = 1.0  # so that the values read are factors
        where = "lr_scheduler_kwargs"
        try:
            scheduler = get_scheduler(args.lr_scheduler_type, optimizer, steps, self._steps, args.lr_scheduler_kwargs)
        except (TypeError, ValueError) as error:
            raise refused(
                f"{args.lr_scheduler_type}: {error}", where, "give the arguments that the scheduler takes"
            ) from error
        return LearningRateFactors(optimizer, {"scheduler": scheduler, "interval": "step", "frequency": 1}, where)

    # ---- data

    def train_data(self) -> Any:
        return self.sets[0]

    def eval_data(self) -> Any:
        return self.sets[1]

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        if isinstance(sample, Validated):
            sample = sample.sample
        if not self.arguments.remove_unused_columns or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self._columns}

    def collate(self, samples: list[Any]) -> Given:
        batch = self.collator(samples)
        given = Given(
            dict(batch) if isinstance(batch, Mapping) or hasattr(batch, "keys") else batch, len(samples), "train"
        )
        unit = vars(self).get("_unit")
        return given._replace(is_empty=unit not in (None, units.SAMPLES) and not float(unit.count(given)))

    @functools.cached_property
    def _columns(self) -> set[str]:
        """The columns that the model takes, which are those that Trainer keeps."""
        names = set(inspect.signature(type(self._pristine).forward).parameters)
        return names | {"label", "label_ids", *self._labels}

    @functools.cached_property
    def _labels(self) -> list[str]:
        from transformers.utils import generic

        find: Any = generic.find_labels
        return list(self.arguments.label_names or find(type(self._pristine)) or ["labels"])

    # ---- the loss and the predictions

    def weight(self, batch: Given) -> Any:
        if self.given_weight is None and self._unit == units.SAMPLES:
            units.check_no_ignored(batch, self._unit, self._with_ignored, self._where)
        return None if self._unit == units.SAMPLES else self._unit.count(batch)

    def loss(self, model: nn.Module, batch: Given) -> Any:
        content = self._unit.filled(batch) if batch.is_empty else batch.batch
        outputs = model(**content)
        mean = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        total = mean * 0.0 if batch.is_empty else mean * self._unit.count(batch)
        if model.training or self.compute_metrics is None:
            return total
        return total, self._predictions(outputs, batch)

    def predict(self, model: nn.Module, batch: Given) -> Any:
        return self._predictions(model(**batch.batch), batch)

    def _predictions(self, outputs: Any, batch: Given) -> Any:
        """What Trainer passes to compute_metrics: all outputs except the loss."""
        left_out = ("loss", *(getattr(self._pristine.config, "keys_to_ignore_at_inference", None) or ()))
        found = tuple(value for name, value in outputs.items() if name not in left_out)
        kept = found[0] if len(found) == 1 else found
        if self.preprocess is None:
            return kept
        labels = tuple(batch.batch[name] for name in self._labels if name in batch.batch)
        return self.preprocess(kept, labels[0] if len(labels) == 1 else labels)

    def metrics(self) -> Metrics | None:
        if self.compute_metrics is None:
            return None
        from lockstep_recipes.adapters.gathered import gathered

        return gathered(self.compute_metrics, self._labels)

    # ---- the unit of the mean

    @property
    def _where(self) -> str:
        return line_of(type(self._pristine).forward)

    @functools.cached_property
    def _unit(self) -> Any:
        """What the loss of the model is averaged over, found by trying a few samples."""
        if self.given_weight is not None:
            return units.SAMPLES if self.given_weight == "samples" else units.OwnUnit(self.given_weight)
        model = copy.deepcopy(self._pristine).to("cpu").eval()
        kind = next(one.dtype for one in model.parameters() if one.is_floating_point())
        model = model.float() if kind.itemsize < 4 else model
        data, rounding = self.sets[0], units.Rounding()
        with torch.no_grad(), torch.device("cpu"), restored_generators(_CPU):
            seed_all(0)
            whole = self.collate([self.prepare(data[place], 0, True) for place in units.spread(len(data))])

            def measured(given: Given) -> tuple[Given, dict[str, float]]:
                seed_all(0)
                with rounding:
                    outputs = model(**given.batch)
                found = outputs.get("loss") if isinstance(outputs, Mapping) else None
                if not isinstance(found, Tensor) or found.ndim:
                    remedy = "give it labels: a data set or a collator with the column `labels`"
                    raise refused(f"the model returns no loss for {sorted(given.batch)}", self._where, remedy)
                return given, {"": float(found)}

            count = whole.samples

            def trial() -> units.HalvesTrial:
                cut = [(units.sliced(whole, 0, at), units.sliced(whole, at, count)) for at in units.cuts(count)]
                return units.HalvesTrial(measured(whole), [(measured(one), measured(other)) for one, other in cut])

            fits, last = units.settled(model, trial, rounding)
        self._with_ignored = units.with_ignored(whole.batch)
        unit = units.of_loss(fits, last, self._where, near=rounding.near)
        self.notes.append(f"the loss of the model is a mean over {unit}, as {count} samples show")
        return unit


def _check_sets(train: Any, evaluated: Any) -> None:
    """Raises UsageError if the samples of a data set cannot be read by index."""
    for name, data in (("train_dataset", train), ("eval_dataset", evaluated)):
        where = f"adapters.transformers({name}=...)"
        if isinstance(data, Mapping):
            remedy = "give one of them; torch.utils.data.ConcatDataset joins several"
            raise refused(f"it is a {type(data).__name__} of data sets: {', '.join(map(str, data))}", where, remedy)
        is_missing = data is None and name == "train_dataset"
        if is_missing or isinstance(data, IterableDataset) or (data is not None and not hasattr(data, "__len__")):
            remedy = "give a data set with len() and [index]; for a stream, write a Task: lockstep --explain streams"
            raise refused("it is missing" if is_missing else f"it is a {type(data).__name__}", where, remedy)


def _decaying(module: nn.Module) -> set[str]:
    """The names of parameters with weight decay, as in Trainer: all but biases and normalisation parameters."""
    from transformers import trainer_pt_utils

    names_of: Any = trainer_pt_utils.get_parameter_names
    kept_out: Sequence[str] = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return set(names_of(module, [nn.LayerNorm], kept_out))
