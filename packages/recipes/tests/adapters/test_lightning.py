"""A LightningModule and a DataModule train as in plain torch, on any ranks; and what cannot be kept has its line."""

import copy
import importlib.util

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

pl = pytest.importorskip("pytorch_lightning")

from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from lockstep import LockstepError, Trainer  # noqa: E402
from lockstep.configs import config_file  # noqa: E402
from lockstep.core.config.sections import RunConfig  # noqa: E402
from lockstep.core.data.order import permute  # noqa: E402
from lockstep.core.foreign_task import with_implied  # noqa: E402
from lockstep_recipes import adapters  # noqa: E402
from packages.recipes.tests.adapters import lightning_cases as cases  # noqa: E402
from tests import runs  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.selection import mainly  # noqa: E402

STEPS = 18
TRAINER = {"max_epochs": 3, "gradient_clip_val": 0.5, "devices": 1, "logger": False}


def settings(**sections):
    base = runs.config(**sections)
    del base["optim"], base["batch"]
    return base | {"batch": {"micro": 5}}


def fit(folder, steps, missing=True, strategy="ddp"):
    torch.manual_seed(3)
    task = adapters.lightning(cases.Net(), cases.Data(missing), trainer=TRAINER)
    train, parallel = {"steps": steps, "eval_every_steps": 6}, {"strategy": strategy}
    return runs.fit(task, settings(train=train, parallel=parallel), folder)


def fit_in_shared_folder(steps, strategy):
    with runs.shared_folder() as folder:
        return fit(folder, steps, strategy=strategy)


def by_hand(missing=True):
    """Plain torch: the whole global batch at once, by the mean over its labels. The weights, and results of epochs."""
    torch.manual_seed(3)
    model, loaders = cases.Net(), cases.Data(missing)
    loaders.setup("fit")
    (inputs, labels), (eval_inputs, eval_labels) = loaders.sets
    (optimizer,), (scheduler,) = model.configure_optimizers()
    results = []
    for epoch in range(3):
        for start in range(0, 70, 12):
            batch = torch.from_numpy(permute(np.arange(start, min(70, start + 12)), 70, 0, epoch))
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), labels[batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            outputs = model(eval_inputs)
        accuracy = MulticlassAccuracy(3, average="macro", ignore_index=-100)
        accuracy.update(outputs, eval_labels)
        results.append((float(cross_entropy(outputs, eval_labels)), float(accuracy.compute())))
    return {name: value.detach() for name, value in model.state_dict().items()}, results


RANKS = mainly([(1, "single")], [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")])


@pytest.mark.parametrize(("world", "strategy"), RANKS)
def test_it_trains_as_plain_torch(world, strategy, tmp_path):
    if world == 1:
        weights, results = fit(tmp_path / "run", STEPS, strategy=strategy)
    else:
        weights, results = run_ranks(world, fit_in_shared_folder, STEPS, strategy)[0]
    expected, evaluated = by_hand()
    assert runs.difference(weights, expected) < 1e-10
    assert results["eval/val_loss"] == pytest.approx(evaluated[-1][0], rel=1e-10)
    assert results["eval/val_acc"] == pytest.approx(evaluated[-1][1], rel=1e-6)  # torchmetrics counts in float32
    assert results["train/lr"] == pytest.approx(0.02 * 0.25)
    assert results["train/train_loss"] == pytest.approx(results["train/loss"], rel=1e-12)
    assert 200 <= results["train/progress"] < 200 + STEPS  # the third epoch


def test_the_unit_is_the_sample_where_all_samples_have_a_label(tmp_path):
    weights, _ = fit(tmp_path / "run", STEPS, missing=False)
    assert runs.difference(weights, by_hand(missing=False)[0]) < 1e-10
    assert "a mean over samples" in (tmp_path / "run" / "train.log").read_text()


def test_a_label_that_is_missing_in_no_sample_that_was_tried_is_an_error(tmp_path):
    data = cases.Data()
    data.setup("fit")
    data.sets[0][1][3] = -100
    data.setup = lambda stage: None
    task = adapters.lightning(cases.Net(), data)
    with pytest.raises(LockstepError, match="-100"):
        runs.fit(task, settings(train={"epochs": 1, "steps": None}), tmp_path / "run")


def resumed(folder):
    return fit(folder, STEPS, strategy="fsdp")[0]


@pytest.mark.exhaustive  # that of test_transformers.py, and on one rank the test of the training above
@pytest.mark.parametrize("world", [2, 3])
def test_it_goes_on_on_other_ranks_that_share_the_model(world, tmp_path):
    fit(tmp_path / "run", 8)
    weights = run_ranks(world, resumed, tmp_path / "run")[0]
    assert runs.difference(weights, by_hand()[0]) < 1e-10


def test_a_file_with_a_module_trains_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from packages.recipes.tests.adapters.lightning_cases import Data, Net\n")
    quick = ["device=cpu", "log.writers=[text_log]", "log.pictures=0", "train.epochs=1"]
    trainer = Trainer(config_file.load("mine.py:Net", ["task.width=4", "task.missing=true", *quick]), quiet=True)
    assert "eval/val_loss" in trainer.fit()
    assert trainer.config.batch.global_ == 12  # the loader's
    assert trainer.model.net[0].out_features == 4
    with pytest.raises(LockstepError, match=r"task.wdith: unknown key\n.*did you mean width"):
        Trainer(config_file.load("mine.py:Net", ["task.wdith=4", *quick]), run_dir="other", quiet=True).fit()


def test_the_optimizer_also_takes_copies_of_the_parameters():
    task = adapters.lightning(cases.Net(), cases.Data())
    copies = [parameter.detach().clone() for parameter in task.model().parameters()]
    made = task.optimizer([{"params": copies, "name": "default"}])
    assert {id(one) for group in made.param_groups for one in group["params"]} == {id(one) for one in copies}
    other = [{"params": [torch.nn.Parameter(torch.zeros(3))], "name": "default"}]
    with pytest.raises(LockstepError, match="a different model"):
        task.optimizer(other)


# ---- schedulers and frozen parameters


def scheduled(function, **options):
    """A configure_optimizers whose scheduler has the factor `function(module, updates)`."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: function(self, count))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", **options}}

    return configure_optimizers


def rates(configure_optimizers, steps, data=None, **trainer):
    """The factors of the first updates, of a module with 70 samples in batches of 12."""
    task = adapters.lightning(net(configure_optimizers=configure_optimizers), data or cases.Data(), trainer=trainer)
    task.configured(with_implied(RunConfig(), task.implied))
    return [task.schedule(update) for update in range(steps)]


def test_a_frequency_by_step_counts_the_batches_of_each_epoch_anew():
    expected, steps = [], 0
    for _ in range(3):
        for batch in range(1, 7):
            expected.append(0.5**steps)
            steps += batch % 4 == 0  # Lightning's rule
    found = rates(scheduled(lambda module, count: 0.5**count, frequency=4), 18, max_epochs=3)
    assert found == pytest.approx(expected)
    assert rates(scheduled(lambda module, count: 0.5**count), 18, max_epochs=3)[-1] == 0.5**17
    with pytest.raises(LockstepError, match=r"test_lightning.py:\d+: the scheduler has frequency=4"):
        rates(scheduled(lambda module, count: 1.0, frequency=4), 1, accumulate_grad_batches=2)


def test_a_function_of_a_scheduler_may_ask_for_the_end_of_the_training():
    found = rates(scheduled(lambda module, count: 1 - count / module.trainer.max_steps), 7, max_steps=7)
    assert found == pytest.approx([1 - count / 7 for count in range(7)])
    with pytest.raises(LockstepError, match=r"test_lightning.py:\d+: trainer.current_epoch has no counterpart"):
        rates(scheduled(lambda module, count: 0.5**module.current_epoch), 1, max_steps=7)


def test_a_scheduler_that_is_too_short_is_an_error_before_the_training():
    def short(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    with pytest.raises(LockstepError, match=f":{short.__code__.co_firstlineno}: step 9 of the scheduler: Tried"):
        rates(short, 1, max_epochs=3)


def freezes_the_first_layer(self):
    self.net[0].requires_grad_(False)
    return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def test_what_configure_optimizers_freezes_stays_as_it_is_and_the_rest_trains(tmp_path):
    torch.manual_seed(3)
    module = net(configure_optimizers=freezes_the_first_layer)
    model = copy.deepcopy(module)
    data = cases.Data()
    data.setup("fit")
    weights, _ = runs.fit(adapters.lightning(module, cases.Data()), settings(train={"steps": 2}), tmp_path / "run")
    optimizer = model.configure_optimizers()
    for start in (0, 12):
        batch = torch.from_numpy(permute(np.arange(start, start + 12), 70, 0, 0))
        optimizer.zero_grad()
        cross_entropy(model(data.sets[0][0][batch]), data.sets[0][1][batch]).backward()
        optimizer.step()
    assert runs.difference(weights, {name: value.detach() for name, value in model.state_dict().items()}) < 1e-10


def test_the_second_argument_of_a_step_has_any_name(tmp_path):
    members = {
        "training_step": lambda self, b, i: cross_entropy(self(b[0]), b[1]),
        "validation_step": lambda self, *args: self.log("seen", args[0][0].mean()),
    }
    _, results = runs.fit(
        adapters.lightning(net(**members), cases.Data()), settings(train={"steps": 2}), tmp_path / "run"
    )
    assert results["eval/seen"] == pytest.approx(float(cases.data(29, 1)[0].mean()))


def test_a_module_may_log_metrics_alone(tmp_path):
    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("acc", self.accuracy)

    silent = {
        "training_step": lambda self, b, i: cross_entropy(self.net(b[0]), b[1]),
        "forward": pl.LightningModule.forward,
    }
    torch.manual_seed(3)
    task = adapters.lightning(net(validation_step=validation_step, **silent), cases.Data())
    weights, results = runs.fit(task, settings(train={"steps": 2}), tmp_path / "run")
    model, (inputs, labels) = cases.Net(), cases.data(29, 1)
    model.load_state_dict(weights)
    expected = MulticlassAccuracy(3, average="macro")(model(inputs), labels)
    assert results["eval/acc"] == pytest.approx(float(expected), rel=1e-6)


def test_a_loader_that_is_set_on_the_object_is_used():
    data = cases.Data()
    data.val_dataloader = lambda: torch.utils.data.DataLoader([1.0, 2.0])
    assert len(adapters.lightning(cases.Net(), data).eval_data()) == 2


# ---- what cannot be kept


def net(**members):
    return type("Own", (cases.Net,), members)()


def uses_batch_idx(self, batch, batch_idx):
    if batch_idx % 10 == 0:
        pass
    return cases.Net.training_step(self, batch, batch_idx)


def gathers(self, batch, batch_idx):
    return self.all_gather(self(batch[0])).sum()


def sums(self, batch, batch_idx):
    return cross_entropy(self(batch[0]), batch[1], reduction="sum")


def normalises_by_batch(self, batch, batch_idx):
    return (self(batch[0]) - self(batch[0]).mean(0)).square().mean().sqrt()


def two_optimizers(self):
    return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def cycles_momentum(self):
    optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def at_the_end(self):
    pass


def by_hand_optimized(self):
    cases.Net.__init__(self)
    self.automatic_optimization = False


def hooked_by_hand(self):
    cases.Net.__init__(self)
    self.on_train_epoch_end = lambda: None


def masks_gradients(self):
    cases.Net.__init__(self)
    self.net[0].weight.register_hook(lambda gradient: gradient * 2)


def prints_gradients(self, stage):
    self.net[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)


def uses_the_number(self, b, i):
    return self(b[0]).mean() * (i + 1)


def endless(self):
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(70))

    return torch.utils.data.DataLoader(Numbers(), batch_size=12)


def half(self):
    data = torch.utils.data.TensorDataset(*self.sets[0])
    return torch.utils.data.DataLoader(data, sampler=torch.utils.data.SequentialSampler(range(35)))


def world_size(self, batch, batch_idx):
    return cases.Net.training_step(self, batch, batch_idx) / self.trainer.world_size


def own_sampler(self):
    class Mine(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(70))

        def __len__(self):
            return 70

    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.sets[0]), sampler=Mine())


REFUSED = [
    ({"training_step": uses_batch_idx}, {}, "batch_idx is used", uses_batch_idx, 1),
    ({"training_step": uses_the_number}, {}, "batch_idx is used", uses_the_number, 1),
    ({"__init__": masks_gradients}, {}, "the gradient of net.0.weight has a hook", masks_gradients, 2),
    ({"setup": prints_gradients}, {}, "the gradient of net.2.bias has a hook", prints_gradients, 1),
    ({}, {"train_dataloader": endless}, "lockstep --explain streams", endless, 0),
    ({}, {"val_dataloader": endless}, "lockstep --explain streams", endless, 0),
    ({}, {"train_dataloader": half}, "by a SequentialSampler", half, 0),
    ({"training_step": gathers}, {}, "self.all_gather communicates", gathers, 1),
    ({"training_step": sums}, {}, "is a sum over samples", sums, 0),
    ({"training_step": normalises_by_batch}, {}, "is not a mean over samples", normalises_by_batch, 0),
    ({"training_step": world_size}, {}, "trainer.world_size", world_size, 1),
    ({"configure_optimizers": two_optimizers}, {}, "it returns 2 optimizers", two_optimizers, 0),
    ({"configure_optimizers": plateau}, {}, "schedule.plateau='{metric: eval/val_loss", plateau, 0),
    ({"configure_optimizers": cycles_momentum}, {}, "cycle_momentum=False", cycles_momentum, 0),
    ({"on_train_epoch_end": at_the_end}, {}, "ignore=['on_train_epoch_end']", at_the_end, 0),
    ({"__init__": hooked_by_hand}, {}, "Own.on_train_epoch_end would not be called", hooked_by_hand, 2),
    ({"__init__": by_hand_optimized}, {}, "automatic_optimization is False", by_hand_optimized, 2),
    ({}, {"train_dataloader": own_sampler}, "by a Mine", own_sampler, 0),
]


@pytest.mark.parametrize(("members", "of_data", "message", "function", "line"), REFUSED)
def test_what_cannot_be_kept_is_an_error_with_its_line(tmp_path, members, of_data, message, function, line):

    def train():
        data = type("OwnData", (cases.Data,), of_data)()
        task = adapters.lightning(net(**members), data, trainer={"max_epochs": 1})
        runs.fit(task, settings(train={"steps": None}), tmp_path / "run")

    with pytest.raises(LockstepError) as caught:
        train()
    assert message in str(caught.value)
    assert f"{__file__}:{function.__code__.co_firstlineno + line}" in str(caught.value)


def test_arguments_of_the_trainer_are_named_all_at_once(tmp_path):
    class Draws(pl.Callback):
        pass

    given = {"max_epochs": 1, "limit_train_batches": 0.1, "max_epoch": 3, "precision": "64", "callbacks": [Draws()]}
    with pytest.raises(LockstepError) as caught:
        runs.fit(adapters.lightning(cases.Net(), cases.Data(), trainer=given), settings(), tmp_path / "run")
    for text in ("limit_train_batches=0.1", "did you mean max_epochs", "precision='64'", "the callback Draws"):
        assert text in str(caught.value)


def test_arguments_of_the_trainer_become_keys(tmp_path):
    callbacks = [pl.callbacks.EarlyStopping("val_loss", patience=2), pl.callbacks.ModelCheckpoint(monitor="val_loss")]
    given = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "devices": 2,
        "callbacks": callbacks,
        "max_time": "00:01:00:00",
    }
    task = adapters.lightning(cases.Net(), cases.Data(True), trainer=given)
    trainer = Trainer({"device": "cpu", "log": {"writers": [], "pictures": 0}}, run_dir=tmp_path / "run", quiet=True)
    trainer.fit(task)
    config = trainer.config
    assert (config.batch.global_, config.train.epochs, config.train.max_time) == (48, 2, 3600)
    assert config.train.stop_when.metric == "eval/val_loss"
    assert config.checkpoint.keep_best == "min eval/val_loss"


IN_ANY_FOLDER = """
import functools
import torch
from torch.nn.functional import cross_entropy
from packages.recipes.tests.adapters.lightning_cases import Net


class Logs(Net):
    def training_step(self, batch, batch_idx):
        return functools.reduce(lambda name, value: self.log(name, value), ["words", "many"])  # HERE


class Asks(Net):
    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        return torch.utils.checkpoint.checkpoint(lambda: self.trainer.world_size, use_reentrant=False)  # HERE


class Gathers(Net):
    def validation_step(self, batch, batch_idx):
        self.all_gather(batch)  # HERE


class Steps(Net):
    def training_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.optimizers().step()  # HERE
"""


def test_errors_name_the_users_line_in_folders_that_are_called_as_libraries(tmp_path):
    lines = [number for number, line in enumerate(IN_ANY_FOLDER.split("\n"), 1) if "HERE" in line]
    for name in ("lockstep", "torch", "transformers", "lightning", "pytorch_lightning", "torchmetrics"):
        file = tmp_path / name / "src" / "mine.py"
        file.parent.mkdir(parents=True)
        file.write_text(IN_ANY_FOLDER)
        spec = importlib.util.spec_from_file_location(f"mine_in_{name}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for kind, line in zip((module.Logs, module.Asks, module.Gathers, module.Steps), lines, strict=True):
            task = adapters.lightning(kind(), cases.Data(), weight="samples")
            with pytest.raises(LockstepError) as caught:
                task.metrics()
            assert str(caught.value).startswith(f"{file}:{line}: "), (name, kind.__name__, str(caught.value))


# ---- ordinary modules


def one_cycle(self):
    """Asks for the length of the training, as Lightning's documentation advises."""
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    steps = self.trainer.estimated_stepping_batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, cycle_momentum=False, total_steps=steps)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_what_asks_for_the_length_of_the_training_also_serves_the_trained_model(tmp_path):
    def task():
        return adapters.lightning(net(configure_optimizers=one_cycle), cases.Data(), trainer={"max_epochs": 2})

    def trainer():
        return Trainer({"device": "cpu", "log": {"writers": [], "pictures": 0}}, run_dir=tmp_path / "run", quiet=True)

    trained = trainer()
    results = trained.fit(task())
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, cycle_momentum=False, total_steps=12)
    for _ in range(11):
        optimizer.step()
        cycle.step()
    assert results["train/lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    evaluating, evaluated = trainer(), task()
    assert evaluating.evaluate(evaluated)["val_loss"] == pytest.approx(results["eval/val_loss"], rel=1e-6)
    assert runs.difference(dict(evaluating.model.state_dict()), dict(trained.model.state_dict())) == 0
    assert len(trainer().predict(task())) == 29
    assert trainer().export(tmp_path / "out", task(), program=False).is_file()
    assert trainer().export_training_state(tmp_path / "state.pt", task()).is_file()


def test_a_micro_batch_is_compared_with_the_batch_of_the_loader(tmp_path):
    def fit(micro, **more):
        task = adapters.lightning(cases.Net(), cases.Data(batch_size=64), trainer={"max_epochs": 1})
        config = {"device": "cpu", "batch": {"micro": micro, **more}, "log": {"writers": [], "pictures": 0}}
        trainer = Trainer(config, run_dir=tmp_path / f"run{micro}", quiet=True)
        trainer.fit(task)
        return trainer.config.batch

    assert (fit(48).global_, fit(48).micro) == (64, 48)
    with pytest.raises(
        LockstepError, match=r"micro \(65\) is above global \(64\).*\n.*the code says .*batch.global=64"
    ):
        fit(65)
    with pytest.raises(LockstepError, match=r"micro \(33\) is above global \(32\)"):
        fit(33, **{"global": 32})
    with pytest.raises(LockstepError, match=r"batch.micro: micro \(33\) is above global \(32\)"):
        RunConfig.model_validate({"batch": {"micro": 33}}).batch.resolve(1)
    small = with_implied(RunConfig.model_validate({"batch": {"global": 4}}), {"batch.global": 16, "batch.micro": 8})
    assert (small.batch.global_, small.batch.micro) == (4, 4)


def test_an_ordinary_module_has_no_warnings(tmp_path):
    from torchmetrics import MetricCollection

    def __init__(self):
        cases.Net.__init__(self)
        both = {name: MulticlassAccuracy(3, average=name) for name in ("micro", "macro")}
        self.several = MetricCollection(both)

    def validation_step(self, batch, batch_idx):
        self.several.update(self(batch[0]), batch[1])
        self.log_dict(self.several)

    log = {"pictures": 1, "writers": ["text_log", "tensorboard"]}
    task = adapters.lightning(net(__init__=__init__, validation_step=validation_step, forward=forward), cases.Data())
    runs.fit(task, settings(train={"steps": 4, "eval_every_steps": 2}, log=log), tmp_path / "run")
    text = (tmp_path / "run" / "train.log").read_text()
    assert "warning" not in text, text
    assert any((tmp_path / "run" / "tensorboard").glob("events*"))


def forward(self, inputs):
    return self.net(inputs.to(self.device))


def test_everything_that_stands_in_the_way_of_an_ordinary_module_is_named_at_once():
    class Own(pl.Callback):
        pass

    members = {"on_validation_epoch_end": at_the_end, "on_train_epoch_end": at_the_end}
    members |= {"configure_optimizers": cycles_momentum}
    with pytest.raises(LockstepError) as caught:
        adapters.lightning(net(**members), cases.Data(), trainer={"callbacks": [Own()], "limit_train_batches": 3})
    for name in ("Own.on_validation_epoch_end", "Own.on_train_epoch_end", "callback Own", "limit_train_batches=3"):
        assert name in str(caught.value), name
    assert "cycle_momentum=False" in str(caught.value)
    for function in (at_the_end, cycles_momentum):
        assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    members = {"training_step": uses_batch_idx, "configure_optimizers": cycles_momentum}
    task = adapters.lightning(net(**members), cases.Data(), trainer={"max_epochs": 1})
    with pytest.raises(LockstepError, match=r"(?s)2 things.*cycle_momentum=False.*batch_idx is used"):
        task.configured(with_implied(RunConfig(), task.implied))
