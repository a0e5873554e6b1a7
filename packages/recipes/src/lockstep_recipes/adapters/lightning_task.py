"""The task of a LightningModule and its DataModule."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.core.config.sections import RunConfig
from lockstep.core.data.randomness import restored_generators, seed_all
from lockstep.core.errors import UsageError
from lockstep.core.foreign_task import Foreign, Keys, line_of, raise_all, refused, together
from lockstep.core.parallel.wrapped_model import inside_compiled, without_wrappers
from lockstep.core.presenter import Presenter
from lockstep.core.task import Metrics, Task
from lockstep_recipes.adapters import hooks, loaders, optimizers, trainer_arguments, units
from lockstep_recipes.adapters.lightning_trial import ProbedStep, tried
from lockstep_recipes.adapters.logged import StepLog, metrics_of
from lockstep_recipes.adapters.serving import Parts, ServedTrainer, arguments_after_batch, served
from lockstep_recipes.adapters.units import Given

_CPU = torch.device("cpu")
_TRIED = 100_000  # steps of a scheduler that are tried before training; this takes seconds


class LoggedValues(Presenter):
    """Presents evaluation samples by what validation_step logs for their batch, and other samples by what predict_step
    returns."""

    def describe(self, output: Any) -> dict[str, Any]:
        if isinstance(output, dict) and output.keys() == {"values", "weights", "calls"}:
            return {"logged_of_its_batch": {name: float(value) for name, value in output["values"].items()}}
        return super().describe(output)


class LightningTask(Foreign):
    """See `lockstep_recipes.adapters.lightning`. A batch is a `Given`: the module's batch, and its samples."""

    presenter = LoggedValues

    def __init__(
        self,
        module: Any,
        datamodule: Any = None,
        *,
        trainer: Mapping[str, Any] | None = None,
        weight: Any = None,
        ignore: Sequence[str] = (),
        make: Callable[[], Any] | None = None,
    ) -> None:
        """
        Args:
            make: makes a new module of the same class and arguments. None: each run starts with a copy of `module`.
        """
        super().__init__()
        self._given, module = module, inside_compiled(module)
        base = hooks.base_of(type(module), "LightningModule")
        if base is None:
            name = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            what = f"the module is {name}"
            raise UsageError(what, where="adapters.lightning", remedy="give an instance of a LightningModule")
        self.foreign, self.datamodule, self.given_weight = module, datamodule, weight
        self.trainer, self.make = dict(trainer or {}), make
        of_data = hooks.base_of(type(datamodule), "LightningDataModule")
        self._check_before_data([(module, base), *([(datamodule, of_data)] if of_data else [])], ignore)
        self._base, self._ignored = base, ignore
        self.validates_by_step = hooks.is_own(module, base, "validation_step")
        self.is_prepared = self._is_set_up = False
        self._plan: dict[str, Any] = {"datamodule": datamodule}
        self._steps = {"train": line_of(module.training_step), "validate": line_of(module.validation_step)}
        self._know_no_module()

    def _check_before_data(self, checked: Sequence[tuple[Any, type]], ignore: Sequence[str]) -> None:
        """Find what is not supported, as far as that is possible without data. One error names all of it."""
        looks: list[Callable[[], object]] = [
            lambda: hooks.check_automatic(self.foreign),
            lambda: self.notes.extend(hooks.check(checked, ignore)),
            lambda: trainer_arguments.keys_of(self.trainer, 1, validates=True),
        ]
        errors = together(looks)
        if errors:  # training will not start, so name what would be found later, too
            with contextlib.suppress(Exception):  # the code may need its data, or the real length of the run
                errors += together([self._try_scheduler])
        raise_all(errors)

    def _try_scheduler(self) -> None:
        """Make the optimizer and step its scheduler once, for a run of any length."""
        module, where = copy.deepcopy(self.foreign), line_of(self.foreign.configure_optimizers)
        plan = {"batches": 100, "steps": 1000, "max_epochs": 10}
        with served(Parts(module), ServedTrainer(self.clock, plan, "train")):
            optimizer, config = optimizers.parse(module.configure_optimizers(), where)
            if config is not None:
                optimizers.LearningRateFactors(optimizer, config, where, module).after(1)

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_made", "_parts", "_optimizers", "schedule"}  # found again
        left_out |= {"_rates"} if vars(self).get("_rates") else set()
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._know_no_module()
        if "_rates" in state and self._rates is None:
            self._no_schedule()

    def _know_no_module(self) -> None:
        self._made: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parts: weakref.WeakKeyDictionary[nn.Module, Parts] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = weakref.WeakKeyDictionary()

    # ---- before training

    def prepare_data(self) -> None:
        self.is_prepared = True
        for one in (self.foreign, self.datamodule):
            if hasattr(one, "prepare_data"):
                with self._serving_data():
                    one.prepare_data()

    def configured(self, config: RunConfig) -> None:
        train, size = config.train, config.batch.global_ or 32
        length = config.data.samples_per_epoch or len(self.train_data())
        batches = length // size if config.data.drop_last else -(-length // size)
        steps = train.steps or max((train.epochs or 1) * batches, train.min_steps or 0)
        self.clock.steps_per_epoch = batches
        self._plan |= {"batches": batches, "steps": steps, "max_steps": train.steps, "max_epochs": train.epochs}
        if self._plan["max_epochs"] is None and train.steps is None:
            self._plan["max_epochs"] = 1
        vars(self).pop("_rates", None)
        vars(self).pop("schedule", None)
        if errors := together([self._find_rates]):
            with contextlib.suppress(Exception):  # `model` would try the steps later
                errors += together([lambda: self._found])
            raise_all(errors)

    @functools.cached_property
    def implied(self) -> Keys:  # type: ignore[override]
        """See `Foreign.implied`. Reads the loaders."""
        train = self._loaded["train"]
        assert train is not None
        keys, validates = dict(train.keys), self._loaded["validate"] is not None
        more, notes = trainer_arguments.keys_of(self.trainer, keys["batch.global"], validates=validates)
        self.notes += [*train.notes, *(self._loaded["validate"].notes if self._loaded["validate"] else []), *notes]
        return keys | more

    # ---- the model

    def model(self) -> nn.Module:
        module = self.make() if self.make is not None else copy.deepcopy(self._given)
        module = without_wrappers(module, "adapters.lightning(module)")
        if self.make is not None:
            self._set_up_module(module)
        with served(Parts(module), self._served()):
            if hasattr(module, "configure_model"):
                module.configure_model()
        hooks.check([(self.foreign, self._base), (module, self._base)], self._ignored)  # `setup` may have set hooks
        for part in Parts(module).modules:  # tracing reads all attributes, and `trainer` would raise
            vars(part)["_jit_is_scripting"] = True
        self._made.add(module)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self._trained)
        self._found  # noqa: B018 - found before workers start and the meta device is used
        return module  # type: ignore[no-any-return]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        module = optimizers.holder(self._made, groups, self._pristine)
        optimizer, _ = self._configured_optimizer(module)
        self._optimizers[module] = optimizers.with_all(optimizer, module)
        return self._optimizers[module]

    def schedule(self, update: int) -> float:
        self._find_rates()
        return 1.0 if self._rates is None else self._rates.at(update, self.clock.steps_per_epoch)

    def _find_rates(self) -> None:
        """Inspect the scheduler once, with the module that training does not change."""
        if "_rates" in vars(self):
            return
        module = self._pristine()
        optimizer, config = self._configured_optimizer(module)
        where = line_of(self.foreign.configure_optimizers)
        self._rates = None if config is None else optimizers.LearningRateFactors(optimizer, config, where, module)
        if self._rates is not None:
            self._rates.check_frequency(trainer_arguments.accumulated(self.trainer))
            trainer = self._served("train")
            del trainer.global_step, trainer.current_epoch  # factors are computed ahead
            self._rates.serve = functools.partial(served, Parts(module), trainer)
            self._rates.at(min(self._plan.get("steps", 1), _TRIED) - 1, self.clock.steps_per_epoch)
        if self._rates is None:
            self._no_schedule()

    def _no_schedule(self) -> None:
        self.schedule = types.MethodType(Task.schedule, self)  # type: ignore[method-assign]  # the config has one

    def _configured_optimizer(self, module: Any) -> tuple[torch.optim.Optimizer, dict[str, Any] | None]:
        with served(Parts(module), self._served("train")):
            returned = module.configure_optimizers()
        return optimizers.parse(returned, line_of(module.configure_optimizers))

    @functools.cached_property
    def _trained(self) -> set[str]:
        """The names of trainable parameters: those in the optimizer that configure_optimizers did not freeze."""
        module = self._pristine()
        before = [name for name, one in module.named_parameters() if one.requires_grad]
        trained = optimizers.trained(module, self._configured_optimizer(module)[0])
        if names := [name for name in before if name not in trained]:
            self.notes.append(
                "these parameters do not train, because they are frozen or not in the optimizer: "
                f"{optimizers.names_of(names)}"
            )
        return trained

    def _pristine(self) -> Any:
        """A module on the CPU that is never trained."""
        self._set_up()
        module = copy.deepcopy(self.foreign)
        with torch.device("cpu"), restored_generators(_CPU), served(Parts(module), self._served()):
            if hasattr(module, "configure_model"):
                module.configure_model()
        return module

    # ---- data

    def _set_up(self) -> None:
        if self._is_set_up:
            return
        if not self.is_prepared:
            self.prepare_data()
        self._is_set_up = True
        with self._serving_data():
            if hasattr(self.datamodule, "setup"):
                self.datamodule.setup("fit")
        self._set_up_module(self.foreign)

    def _serving_data(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, the DataModule and the module see a trainer that is the same on all ranks."""
        trainer = self._served().of_data(*trainer_arguments.devices_of(self.trainer))
        return served(Parts(self.foreign), trainer, data=self.datamodule)

    def _set_up_module(self, module: Any) -> None:
        with served(Parts(module), self._served()):
            module.setup("fit")

    @functools.cached_property
    def _loaded(self) -> dict[str, loaders.Loaded | None]:
        """The training data and the evaluation data. Samplers and shuffling draw no random numbers here."""
        self._set_up()
        return {"train": self._read("train_dataloader"), "validate": self._read("val_dataloader")}

    def _read(self, name: str) -> loaders.Loaded | None:
        owner = self.foreign if self.datamodule is None else self.datamodule
        method, training = getattr(owner, name, None), name.startswith("train")
        base = hooks.base_of(type(owner), "LightningModule") or hooks.base_of(type(owner), "LightningDataModule")
        if method is None or (base is not None and not hooks.is_own(owner, base, name)):
            if training:
                what = f"{type(owner).__name__} has no {name}"
                raise refused(what, "adapters.lightning", "write this method, or give a datamodule that has it")
            return None
        where = line_of(method)
        with self._serving_data():
            found = method()
        if not training and (found is None or (isinstance(found, list) and not found)):
            return None
        loader = loaders.single(found, where)
        if training:
            return loaders.read(loader, where)
        return loaders.read_evaluated(loader, where)

    def train_data(self) -> Any:
        train = self._loaded["train"]
        assert train is not None
        return train.data

    def eval_data(self) -> Any:
        found = self._loaded["validate"]
        return None if found is None else found.data

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        if isinstance(sample, loaders.Validated):
            return "validate", sample.sample
        return "train" if training else "predict", sample

    def collate(self, samples: list[Any]) -> Given:
        purpose, loaded = samples[0][0], self._loaded
        source = loaded["train" if purpose == "train" else "validate"] or loaded["train"]
        collate = source.collate if source is not None else default_collate
        given = Given(collate([sample for _, sample in samples]), len(samples), purpose)
        found = vars(self).get("_found", {}).get(purpose)  # not yet in the trial
        unit = None if found is None else found.units.get("")
        return given._replace(is_empty=unit not in (None, units.SAMPLES) and not float(unit.count(given)))

    # ---- steps

    def weight(self, batch: Given) -> Any:
        unit = self._of(batch).get("")
        if unit is None:  # validation_step returns no loss
            return 0.0
        if self.given_weight is None and unit == units.SAMPLES:
            purpose = "validate" if batch.purpose == "validate" else "train"
            units.check_no_ignored(batch, unit, self._found[purpose].with_ignored, self._steps[purpose])
        return None if unit == units.SAMPLES else unit.count(batch)

    def loss(self, model: nn.Module, batch: Given) -> Any:
        mean, record = self._run(model, batch)
        found = self._of(batch)
        if mean is None:
            mean = torch.zeros((), device=next(model.parameters()).device)
        unit = found.get("")
        total = mean * 0.0 if unit is None or batch.is_empty else mean * unit.count(batch)
        return (total, self._output(record, batch, total.device)) if self._names or self._objects else total

    def predict(self, model: nn.Module, batch: Given) -> Any:
        if batch.purpose == "validate" and (self._names or self._objects):
            _, record = self._run(model, batch)
            return self._output(record, batch, next(model.parameters()).device)
        with served(self._parts_of(model), self._served("predict")):
            step: Any = model.predict_step
            return step(batch.batch, *arguments_after_batch(step))

    def metrics(self) -> Metrics | None:
        return metrics_of(self._names, self._objects, self._steps["train"])

    def _of(self, batch: Given) -> dict[str, Any]:
        """The units of the values of a batch: of validation_step, or of training_step."""
        return self._found["validate" if batch.purpose == "validate" else "train"].units

    def _output(self, record: StepLog, batch: Given, device: torch.device) -> dict[str, Any]:
        found = self._of(batch)
        counts = {name: found[name].count(batch) for name in record.values if found.get(name) is not None}
        return record.output(batch.samples, counts, batch.purpose, device)

    def _run(self, model: Any, batch: Given) -> tuple[Tensor | None, StepLog]:
        """The loss that the step for this batch returned, if any, and what it logged."""
        training = batch.purpose != "validate" or not self.validates_by_step
        step, record = model.training_step if training else model.validation_step, StepLog()
        if training and model not in self._optimizers:  # in the trial, and in experiments of verify
            self._optimizers[model] = self._configured_optimizer(model)[0]
        content = self._of(batch)[""].filled(batch) if batch.is_empty else batch.batch
        with served(self._parts_of(model), self._served(batch.purpose, self._optimizers.get(model)), record):
            returned = step(content, *arguments_after_batch(step))
        if isinstance(returned, Mapping):
            returned = returned.get("loss")
        if returned is None and training:
            what = "it returned no loss"
            raise refused(what, self._steps["train"], "return a loss for every batch, or 0 * the loss")
        if isinstance(returned, Tensor) and returned.ndim == 0 and returned.is_floating_point():
            return returned, record
        if training:
            what = f"it returned a {type(returned).__name__}" + (
                f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
            )
            raise refused(what, self._steps["train"], "return a scalar tensor, or a dict with the key `loss`")
        return None, record

    def _parts_of(self, model: nn.Module) -> Parts:
        if model not in self._parts:
            self._parts[model] = Parts(model)
        return self._parts[model]

    def _served(self, stage: str = "", optimizer: torch.optim.Optimizer | None = None) -> ServedTrainer:
        return ServedTrainer(self.clock, self._plan, stage, optimizer)

    # ---- the trial

    @functools.cached_property
    def _found(self) -> dict[str, ProbedStep]:
        """What a few samples reveal about the step for each purpose, `train` and `validate`."""
        own = units.SAMPLES if self.given_weight == "samples" else units.OwnUnit(self.given_weight)
        module, found = self._pristine(), {"train": ProbedStep(), "validate": ProbedStep()}
        with torch.no_grad(), torch.device("cpu"), restored_generators(_CPU):
            module.eval()
            if any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters()):
                module.float()
            for purpose, data in (("train", self.train_data()), ("validate", self.eval_data())):
                if data is not None:
                    training = purpose == "train"
                    seed_all(0)
                    found[purpose] = tried(
                        module,
                        [self.prepare(data[index], 0, training) for index in units.spread(len(data))],
                        self.collate,
                        self._run,
                        own=own if training and self.given_weight is not None else None,
                        training=training,
                        where=self._steps[purpose],
                    )
                    self.notes += found[purpose].notes
        return found

    @property
    def _names(self) -> list[str]:
        """The names of values that steps log."""
        return sorted({name for one in self._found.values() for name in one.units if name})

    @property
    def _objects(self) -> dict[tuple[str, str], Any]:
        """The metrics that steps log, by the purpose of the step and their names."""
        return {(purpose, name): one for purpose, of in self._found.items() for name, one in of.metrics.items()}
