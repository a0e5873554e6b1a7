"""Every argument of what the adapters take is kept, as there; named in the log; or refused. A new one fails here."""

import dataclasses
import inspect
import random
import warnings

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")
transformers = pytest.importorskip("transformers")

from torch.utils.data import DataLoader  # noqa: E402

from lockstep import LockstepError  # noqa: E402
from lockstep.core.config.sections import RunConfig  # noqa: E402
from lockstep.core.foreign_task import with_implied  # noqa: E402
from lockstep.core.stopping import StopRule  # noqa: E402
from lockstep_recipes import adapters  # noqa: E402
from lockstep_recipes.adapters import callbacks, loaders, trainer_arguments, transformers_arguments  # noqa: E402
from packages.recipes.tests.adapters import test_transformers as tags  # noqa: E402


def parameters(function):
    return {name: one.default for name, one in inspect.signature(function).parameters.items() if name != "self"}


# ---- none is passed over


def test_every_argument_of_lightning_is_kept_named_or_refused():
    known = trainer_arguments.KEPT | trainer_arguments.IGNORED | trainer_arguments.ONLY.keys()
    assert set(parameters(pl.Trainer.__init__)) - known == set()
    for name, kept in callbacks.KEPT.items():
        kind = getattr(pl.callbacks, name)
        known = kept | callbacks.NAMED.get(name, frozenset()) | callbacks.REFUSED.get(name, {}).keys()
        assert set(parameters(kind.__init__)) == known, name
        needed = {"monitor": "x"} if name == "EarlyStopping" else {}
        made = kind(**needed | ({"scheduling": {0: 2}} if "scheduling" in kept else {}))
        for argument in parameters(kind.__init__):
            callbacks.argument(made, argument)  # it can be read


def test_every_argument_of_transformers_is_kept_named_or_refused():
    fields = {one.name: one for one in dataclasses.fields(transformers.TrainingArguments)}
    kept, refused = transformers_arguments.DEFAULTS, transformers_arguments.REFUSED
    assert fields.keys() - kept.keys() - transformers_arguments.IGNORED - refused.keys() == set()
    assert not kept.keys() & (transformers_arguments.IGNORED | refused.keys())
    for name, field in fields.items():
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        default = getattr(default, "value", default)
        if name in kept:
            assert kept[name] == default, name
        elif name in refused:
            assert default in transformers_arguments._NEUTRAL, name
    taken = set(parameters(adapters.transformers)) - {"further", "weight"}
    assert set(parameters(transformers.Trainer.__init__)) - taken - transformers_arguments.OF_TRAINER.keys() == set()


def test_every_argument_of_a_loader_is_kept_named_or_refused():
    assert set(parameters(DataLoader.__init__)) == loaders.KEPT | loaders.NAMED.keys()


# ---- what is named has its name in the log, or in the error


def keys_of(**trainer):
    return trainer_arguments.keys_of(trainer, 8, validates=True)


def test_arguments_of_callbacks_are_named():
    stop = pl.callbacks.EarlyStopping("loss", strict=False, patience=0, verbose=True)
    keep = pl.callbacks.ModelCheckpoint("folder", monitor="loss", save_top_k=3, every_n_train_steps=7)
    shows = [
        pl.callbacks.LearningRateMonitor("step"),
        pl.callbacks.RichProgressBar(),
        pl.callbacks.Timer("00:00:01:00"),
    ]
    keys, (line,) = keys_of(callbacks=[stop, keep, *shows], limit_test_batches=3, devices=-1)
    assert keys["train.stop_when"] == {"metric": "eval/loss", "mode": "min", "patience": 1, "min_delta": 0.0}
    assert keys["checkpoint.keep_best"] == "min eval/loss"
    assert keys["train.max_time"] == 60
    for name in ("strict=False", "verbose=True", "check_finite=True", "save_top_k=3", "every_n_train_steps=7"):
        assert name in line, name
    for name in ("dirpath=", "LearningRateMonitor", "RichProgressBar", "limit_test_batches", "devices"):
        assert name in line, name


def test_what_cannot_be_kept_of_callbacks_and_arguments_is_refused_at_once():
    class ProgressiveResizing(pl.Callback):  # is no progress bar
        pass

    class Own(pl.callbacks.ModelCheckpoint):
        pass

    given = [ProgressiveResizing(), Own(), pl.callbacks.EarlyStopping("loss", divergence_threshold=3.0)]
    given += [pl.callbacks.EarlyStopping("loss"), pl.callbacks.EarlyStopping("other")]
    given += [pl.callbacks.EarlyStopping("loss", min_delta=-0.5)]
    with pytest.raises(LockstepError) as caught:
        keys_of(callbacks=given, max_time="an hour", deterministic="warn", accumulate_grad_batches={0: 1, 4: 2})
    for text in (
        "ProgressiveResizing",
        "callback Own",
        "divergence_threshold=3.0",
        "two callbacks",
        "'an hour'",
        "warn",
    ):
        assert text in str(caught.value), text
    assert "accumulate_grad_batches={0: 1, 4: 2}: give one integer" in str(caught.value)


def test_accumulation_is_one_number_for_the_whole_training():
    scheduler = pl.callbacks.GradientAccumulationScheduler
    for given, expected in (
        ({"accumulate_grad_batches": {0: 1}}, 1),
        ({"accumulate_grad_batches": {0: 3}}, 3),
        ({"accumulate_grad_batches": {4: 1}}, 1),
        ({"accumulate_grad_batches": 3}, 3),
        ({"accumulate_grad_batches": None}, 1),
        ({"callbacks": [scheduler({0: 4})]}, 4),
        ({"callbacks": scheduler({0: 4})}, 4),
    ):
        assert keys_of(**given)[0]["batch.global"] == 8 * expected, given
    for wrong in (0, -1, 1.5, "2", True, {4: 2}, {}, {0: 1, 2: 4}, {0: "2"}):
        with pytest.raises(LockstepError, match="accumulate_grad_batches"):
            keys_of(accumulate_grad_batches=wrong)
    with pytest.raises(LockstepError, match="accumulate_grad_batches"):
        keys_of(callbacks=[scheduler({4: 2})])


def test_devices_are_counted_as_there():
    for given, expected in ((2, 2), ([0, 3], 2), ("0,3", 2), ("2", 2), ("auto", 1), (-1, 1), (None, 1), ([1], 1)):
        assert keys_of(devices=given)[0]["batch.global"] == 8 * expected, given


def test_arguments_of_loaders_are_named_and_samplers_of_evaluations_are_refused():
    data = torch.utils.data.TensorDataset(torch.zeros(8))
    read = loaders.read(DataLoader(data, batch_size=4, shuffle=True, worker_init_fn=print, pin_memory=True), "here")
    assert "worker_init_fn, pin_memory" in read.notes[-1]
    for sampler in (torch.utils.data.SubsetRandomSampler([1, 2]), torch.utils.data.SequentialSampler(range(3))):
        with pytest.raises(LockstepError, match=r"torch\.utils\.data\.Subset"):
            loaders.read_evaluated(DataLoader(data, sampler=sampler), "here")
    with pytest.raises(LockstepError, match="drop_last"):
        loaders.read_evaluated(DataLoader(data, batch_size=3, drop_last=True), "here")
    assert not loaders.read_evaluated(DataLoader(data, batch_size=3, shuffle=True), "here").notes


def test_arguments_of_transformers_trainer_are_refused_at_once():
    class Own(transformers.TrainerCallback):
        pass

    given = {"callbacks": [transformers.EarlyStoppingCallback(2), Own()], "compute_loss_func": print}
    given |= {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None), "tokenizer": print, "eval_datset": 3}
    with pytest.raises(LockstepError) as caught:
        adapters.transformers(tags.model(), {"metric_for_best_model": "f1"}, train_dataset=tags.samples(4, 0), **given)
    expected = ["{metric: eval/f1, mode: max, patience: 2}", "Own: a lockstep.Part", "compute_loss_func: write a Task"]
    for text in [
        *expected,
        "optimizers: optim and lr_scheduler_type",
        "tokenizer: processing_class",
        "did you mean eval_dataset",
    ]:
        assert text in str(caught.value), text
    harmless = {"callbacks": [transformers.PrinterCallback], "optimizers": (None, None), "compute_loss_func": None}
    task = adapters.transformers(tags.model(), {}, train_dataset=tags.samples(4, 0), **harmless)
    assert "ignored callbacks of transformers: PrinterCallback" in task.notes


def test_data_sets_that_transformers_takes_and_the_adapter_does_not_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(known)

    known = tags.samples(4, 0)
    for given, message in (
        (
            {"train_dataset": known, "eval_dataset": {"one": known, "two": known}},
            r"eval_dataset.*data sets: one, two",
        ),
        ({"train_dataset": {"train": known}}, r"train_dataset.*of data sets: train"),
        ({"train_dataset": Stream()}, r"train_dataset.*it is a Stream\n.*lockstep --explain streams"),
        ({"train_dataset": known, "eval_dataset": iter(known)}, r"eval_dataset.*it is a list_iterator"),
        ({"train_dataset": None}, r"train_dataset.*it is missing"),
    ):
        with pytest.raises(LockstepError, match=message):
            adapters.transformers(tags.model(), {}, **given)


def test_training_arguments_with_lists_and_aliases_are_not_passed_over(tmp_path):
    def understood(**given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an alias is deprecated
            objects = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **given)
        return [transformers_arguments.understood(args)[0] for args in (objects, given)]

    for found in understood(gradient_checkpointing=True) + understood(activation_checkpointing=True):
        keys = transformers_arguments.keys_of(found, 50, evaluates=True)
        assert keys["compute.activation_checkpointing"]
    for found in understood(save_strategy="best", metric_for_best_model="accuracy"):
        assert transformers_arguments.keys_of(found, 50, evaluates=True)["checkpoint.keep_best"] == "max eval/accuracy"
    with pytest.raises(LockstepError, match=r"include_for_metrics=\['inputs'\]"):
        understood(include_for_metrics=["inputs"])


# ---- what is kept is as there


def test_an_early_stop_comes_at_the_same_evaluation_as_in_lightning():
    draw = random.Random(0)
    for case in range(300):
        options = {"mode": draw.choice(["min", "max"]), "patience": draw.randint(0, 4)}
        options["min_delta"] = draw.choice([0.0, 0.25, 0.5])
        options["stopping_threshold"] = draw.choice([None, 0.25, 0.5, 0.75])
        theirs = pl.callbacks.EarlyStopping("loss", **options)
        keys: dict = {}
        callbacks.translate(theirs, keys, [], [])
        rule, results = StopRule(**keys["train.stop_when"]), []
        for step in range(12):
            results.append(draw.choice([0.0, 0.25, 0.5, 0.75, 1.0]))
            stops, _ = theirs._evaluate_stopping_criteria(torch.tensor(results[-1]))
            assert bool(rule.reason(results)) == stops, (case, step, options, results)
            if stops:
                break


KWARGS = {
    "linear": {},
    "cosine": {"num_cycles": 0.7},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 0.001, "power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr": 0.001},
    "cosine_warmup_with_min_lr": {"min_lr": 0.001, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 4, "min_lr_ratio": 0.3},
}


def test_every_schedule_of_transformers_has_the_rates_of_theirs():
    stateful = set(transformers_arguments._STATEFUL)
    assert {one.value for one in transformers.SchedulerType} == KWARGS.keys() | stateful
    for name, kwargs in KWARGS.items():
        for lr, changed in ((0.01, {}), (0.01, {"lr": 0.02}), (5e-5 if "lr_end" not in kwargs else 0.1, {})):
            given = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "warmup_steps": 3, "learning_rate": lr}
            task = adapters.transformers(tags.model(), given | {"max_steps": 12}, train_dataset=tags.samples(8, 0))
            config = with_implied(RunConfig.model_validate({"optim": changed}), task.implied)
            task.configured(config)
            theirs = torch.optim.SGD([torch.zeros(1)], lr=config.optim.lr)
            scheduler = transformers.get_scheduler(name, theirs, 3, 12, kwargs)
            for update in range(12):
                ours = config.optim.lr * task.schedule(update)
                assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12), (name, lr, changed, update)
                theirs.step()
                scheduler.step()
    wrong = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}
    with pytest.raises(LockstepError, match=r"lr_scheduler_kwargs: linear: .*power"):
        adapters.transformers(tags.model(), wrong, train_dataset=tags.samples(8, 0)).schedule(0)
