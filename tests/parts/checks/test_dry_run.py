"""Before the first step of a new run: what it finds, what it does not complain of, and that it leaves no trace."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

import lockstep.core.training_run
from lockstep import LockstepError, Metrics, Trainer, losses
from lockstep.core.errors import UsageError
from lockstep.core.parallel.world import World
from lockstep.parts.checks import dry_run
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly

COUPLED = "is not the sum over its samples"
MEAN = "returns a mean, not the SUM over its units"


def told(task, tmp_path, allow_mean_loss=True, **sections):
    """The log of a short training."""
    runs.fit(task, runs.config(train={"steps": 2, "allow_mean_loss": allow_mean_loss}, **sections), tmp_path)
    return (tmp_path / "train.log").read_text()


# ---- a mean where a sum is asked for


class Mean(own_tasks.Plain):
    def loss(self, model, batch):
        return super().loss(model, batch) / len(batch[0])


class MaskedMean(own_tasks.Masked):
    """Over valid labels, which `weight` counts; the two halves of a batch hold very different numbers of them."""

    def loss(self, model, batch):
        return super().loss(model, batch) / batch[2].sum()


class SampleMean(own_tasks.Masked):
    """Over samples, though `weight` counts labels."""

    def loss(self, model, batch):
        return super().loss(model, batch) / len(batch[0])


class OneOfTwoHeads(own_tasks.TwoHeads):
    def loss(self, model, batch):
        losses = super().loss(model, batch)
        return losses | {"b": losses["b"] / len(batch[0])}


class MeanOfMerged(own_tasks.Classes):
    """Before it has learned anything: all samples have the same loss."""

    def model(self):
        self.built = nn.Linear(6, 3, dtype=torch.float64)
        nn.init.zeros_(self.built.weight)
        nn.init.zeros_(self.built.bias)
        return self.built

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])


class ClassWeights(own_tasks.Classes):
    """The mean that torch makes with weights of classes: by their weights, not by samples."""

    def loss(self, model, batch):
        weights = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
        return functional.cross_entropy(model(batch[0]), batch[1], weight=weights)


@pytest.mark.parametrize("task", [Mean, MaskedMean, SampleMean, OneOfTwoHeads, MeanOfMerged, ClassWeights])
def test_a_mean_is_an_error_before_the_first_step(tmp_path, task):
    with pytest.raises(UsageError) as caught:
        told(task(), tmp_path, allow_mean_loss=False)
    text = str(caught.value)
    assert MEAN in text
    assert f"Task.loss ({__file__}:{task.loss.__code__.co_firstlineno}): it" in text
    assert ("head 'b'," in text) == (task is OneOfTwoHeads)
    assert "train.allow_mean_loss=true" in text
    assert "times its number" not in text  # a batch Dice is no sum, whatever its factor
    for remedy in ("reduction='sum'", "Task.weight", "lockstep.losses.dice", "Task.embed"):
        assert remedy in text
    assert not list(tmp_path.glob("checkpoints/*"))
    assert "step 1" not in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("task", [Mean, OneOfTwoHeads])
def test_a_mean_that_is_allowed_is_told_at_the_head_of_the_log_and_at_its_end(tmp_path, task):
    log = told(task(), tmp_path)
    assert log.count(MEAN) == 2
    assert log.index(MEAN) < log.index("step 2/2") < log.rindex(MEAN)
    assert ("head 'b'," in log) == (task is OneOfTwoHeads)


def test_the_warning_says_how_little_of_the_gradient_is_left(tmp_path):
    assert "about 1/24 of the gradient" in told(Mean(), tmp_path / "one", batch={"global": 24})
    assert "about 1/6 of the gradient" in told(Mean(), tmp_path / "four", batch={"global": 24, "micro": 6})
    assert MEAN not in told(
        Mean(), tmp_path / "each", batch={"global": 24, "micro": 1}
    )  # of one sample, the mean is the sum


@pytest.mark.parametrize(
    ("precision", "dtype"),
    mainly([("fp16", torch.float32)], [("bf16", torch.float32), ("fp16", torch.float32), ("fp32", torch.bfloat16)]),
)
def test_a_mean_is_found_in_lower_precision_and_a_sum_is_none(tmp_path, precision, dtype):
    assert MEAN in told(Mean(dtype=dtype), tmp_path / "mean", precision=precision)
    assert MEAN not in told(own_tasks.Plain(dtype=dtype), tmp_path / "sum", precision=precision)


def test_the_warning_is_for_people_and_stays_with_the_run(tmp_path, capsys):
    settings = runs.config(train={"steps": 2})
    for steps in (2, 3, 3):  # new, resumed, complete
        Trainer(settings | {"train": {"steps": steps, "allow_mean_loss": True}}, run_dir=tmp_path).fit(Mean())
        assert capsys.readouterr().out.count(MEAN) == 2


class Contrastive(own_tasks.Plain):
    """Every sample against the others of its batch: summed, a mean, and one number for the batch."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def loss(self, model, batch):
        found = functional.normalize(model(batch[0]))
        return functional.cross_entropy(10 * found @ found.T, torch.arange(len(found)), reduction=self.reduce)


class Penalty(own_tasks.Plain):
    """A head that counts once per micro-batch. The sum of losses by their number is right for any cut of the batch."""

    def weight(self, batch):
        return {"main": float(len(batch[0])), "penalty": 1.0}

    def loss(self, model, batch):
        return {"main": super().loss(model, batch), "penalty": sum(p.square().sum() for p in model.parameters())}


class Nothing(own_tasks.Plain):
    def loss(self, model, batch):
        return super().loss(model, batch) * 0


class Normed(own_tasks.Plain):
    """Batch statistics, dropout, a buffer that is made anew, and random numbers of all kinds."""

    def model(self):
        class Counting(nn.BatchNorm1d):
            def __init__(self):
                super().__init__(16)
                self.register_buffer("passes", torch.zeros(1))

            def forward(self, inputs):
                self.passes = self.passes + 1  # another tensor each time
                return super().forward(inputs)

        self.built = nn.Sequential(nn.Linear(10, 16), Counting(), nn.Dropout(0.3), nn.Linear(16, 5)).to(self.dtype)
        return self.built

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())

    def predict(self, model, batch):
        return model(batch[0])

    def metrics(self):
        from torchmetrics import MeanSquaredError

        return MeanSquaredError()


class MixedUp(own_tasks.Plain):
    """Samples are mixed at random: the loss of a batch may by chance lie between those of its halves, again mixed."""

    def collate(self, samples):
        inputs, targets, mask = default_collate(samples)
        share, other = np.random.beta(0.4, 0.4), torch.randperm(len(inputs))
        size = 10 ** np.random.uniform(-1, 1)
        return (share * inputs + (1 - share) * inputs[other]) * size, targets * size, mask


RIGHT = [
    own_tasks.Plain(),
    own_tasks.Masked(),
    own_tasks.TwoHeads(),
    own_tasks.Dropout(),
    own_tasks.Deep(dropout=0.5),
    own_tasks.Classes(),
    Penalty(),
    Nothing(),
    Normed(),
    MixedUp(),
]


@pytest.mark.parametrize("task", mainly(RIGHT[7:], RIGHT), ids=lambda task: type(task).__name__)
def test_no_other_loss_is_called_a_mean(tmp_path, task):
    log = told(copy.deepcopy(task), tmp_path, allow_mean_loss=False, seed=2).lower()
    assert "mean" not in log
    assert COUPLED not in log


# ---- a loss in which samples influence each other


class Dice(own_tasks.Plain):
    """A ratio over the batch, times the samples: no sum, and no mean."""

    def loss(self, model, batch):
        shares, truth = model(batch[0]).sigmoid(), batch[2]
        return (1 - 2 * (shares * truth).sum() / (shares.sum() + truth.sum())) * len(truth)


class ClassWeightsTimesSamples(ClassWeights):
    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[0])


class RightClassWeights(own_tasks.Classes):
    weights = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)

    def weight(self, batch):
        return self.weights[batch[1]].sum()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], self.weights, reduction="sum")


class RightDice(own_tasks.Plain):
    def loss(self, model, batch):
        return losses.dice(model(batch[0]).sigmoid(), batch[1] > 0)


class DiceOfTheGlobalBatch(own_tasks.Plain):
    def embed(self, model, batch):
        return losses.overlaps(model(batch[0]).sigmoid(), batch[1] > 0)

    def loss(self, model, sums):
        return losses.batch_dice(sums)


def test_samples_that_influence_each_other_are_told_at_both_ends_of_the_log(tmp_path):
    coupled = [Dice(), ClassWeightsTimesSamples(), Contrastive("sum"), Contrastive("mean")]
    for number, task in enumerate(coupled):
        log = told(task, tmp_path / str(number), allow_mean_loss=False)
        assert log.count(COUPLED) == 2, task
        assert f"WARNING: Task.loss ({__file__}:{task.loss.__code__.co_firstlineno}): " in log
        assert "Task.embed" in log
        assert "Task.weight" in log
    for task in (RightClassWeights(), RightDice(), DiceOfTheGlobalBatch()):
        log = told(task, tmp_path / type(task).__name__, allow_mean_loss=False)
        assert COUPLED not in log, task


def test_one_sample_has_no_halves(tmp_path):
    assert MEAN not in told(Mean(length=1), tmp_path)


def test_samples_that_cannot_be_read_are_left_out_of_the_comparison(tmp_path):
    class FromFilesMean(own_tasks.FromFiles):
        def loss(self, model, batch):
            return super().loss(model, batch) / len(batch[0])

    few = {"data": {"on_error": "skip"}, "batch": {"global": 8}}
    assert MEAN in told(FromFilesMean(40, broken=range(0, 40, 3)), tmp_path / "some", **few)
    told(own_tasks.FromFiles(40, broken=range(1, 30)), tmp_path / "most", **few)
    with pytest.raises(LockstepError, match=r"folder/0\d\d\.png: sample \d+ cannot be read"):
        told(FromFilesMean(40, broken=range(40)), tmp_path / "none")


def test_a_loss_that_works_in_training_mode_alone_is_no_error_where_nothing_is_evaluated(tmp_path):
    class TrainingOnly(own_tasks.Plain):
        def loss(self, model, batch):
            if not model.training:
                raise AttributeError("predictions have no loss")
            return super().loss(model, batch)

    assert MEAN not in told(TrainingOnly(), tmp_path / "trained")
    with pytest.raises(AttributeError, match="predictions have no loss"):
        runs.fit(TrainingOnly(eval_length=10), runs.config(train={"eval_every_steps": 5}), tmp_path / "evaluated")


# ---- what an evaluation needs


class Untrained(own_tasks.Classes):
    """Fails where it is trained."""

    def loss(self, model, batch):
        assert not model.training, "it trained"
        return super().loss(model, batch)


class NoPredict(own_tasks.Plain):
    def metrics(self):
        from torchmetrics import MeanMetric

        return MeanMetric()

    def loss(self, model, batch):
        assert not model.training, "it trained"
        return super().loss(model, batch)


class BrokenEvaluation(own_tasks.FromFiles):
    def eval_data(self):
        return own_tasks.Files(40, broken=[0])

    def loss(self, model, batch):
        assert not model.training, "it trained"
        return super().loss(model, batch)


class WrongTargets(Untrained):
    def update(self, metrics, output, batch):
        metrics["accuracy"].update(output, batch[1].double().unsqueeze(0))


class OtherHeads(own_tasks.TwoHeads):
    def loss(self, model, batch):
        losses = super().loss(model, batch)
        return losses if model.training else {"a": losses["a"]}


EVALUATED = runs.config(train={"steps": 4, "eval_every_steps": 2})
CANNOT_BE_EVALUATED = [
    (NoPredict(eval_length=10), r"Task\.predict: NoPredict has no predict"),
    (BrokenEvaluation(), r"folder/000\.png: sample 0 cannot be read: OSError: truncated file"),
    (WrongTargets(), "preds|target"),
    (
        OtherHeads(eval_length=10),
        r"Task\.loss, in evaluation: the loss has the heads \['a'\], Task\.weight has \['a', 'b'\]",
    ),
]


@pytest.mark.parametrize("evaluates", [0, 5])
def test_a_loss_of_the_wrong_type_is_left_to_those_who_name_it(tmp_path, evaluates):
    class Vector(own_tasks.Plain):
        def loss(self, model, batch):
            return (model(batch[0]) - batch[1]).square().mean(dim=1)

    with pytest.raises(LockstepError, match=r"tensor of shape \((24|8),\)"):
        runs.fit(Vector(eval_length=10), runs.config(train={"eval_every_steps": evaluates}), tmp_path)


@pytest.mark.parametrize(
    ("task", "message"), CANNOT_BE_EVALUATED, ids=[type(task).__name__ for task, _ in CANNOT_BE_EVALUATED]
)
def test_what_cannot_be_evaluated_is_an_error_before_the_first_step(tmp_path, task, message):
    with pytest.raises((LockstepError, ValueError, RuntimeError), match=message):
        runs.fit(task, EVALUATED, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_misspelt_metric_to_keep_by_is_an_error_before_the_first_step(tmp_path):
    settings = EVALUATED | {"checkpoint": {"keep_best": "max eval/acuracy"}}
    with pytest.raises(
        LockstepError,
        match=r"checkpoint\.keep_best: there is no metric eval/acuracy\n  remedy: did you mean eval/accuracy\?",
    ) as caught:
        runs.fit(Untrained(), settings, tmp_path)
    assert caught.value.exit_code == 2
    assert "There are: eval/loss, eval/samples, eval/bad, eval/accuracy, " in str(caught.value)
    with pytest.raises(LockstepError, match="the run never evaluates, so there is no"):
        runs.fit(Untrained(), settings | {"train": {"steps": 4}}, tmp_path)


def test_to_keep_the_best_is_no_error_if_nothing_is_evaluated_on_purpose_or_for_lack_of_data(tmp_path):
    class WithoutData(own_tasks.Classes):
        def eval_data(self):
            return None

    best = {"checkpoint": {"keep_best": "min eval/loss"}}
    cases = ((own_tasks.Classes(), {"steps": 2, "eval_every_steps": 0}), (WithoutData(), EVALUATED["train"]))
    for number, (task, train) in enumerate(cases):
        folder = tmp_path / str(number)
        runs.fit(task, EVALUATED | best | {"train": train}, folder)
        log = (folder / "train.log").read_text()
        assert "note: the run never evaluates, so checkpoint.keep_best keeps no checkpoint" in log, train


def test_a_metric_to_keep_by_that_is_misspelt_in_a_later_start_is_an_error_before_its_first_step(tmp_path):
    runs.fit(own_tasks.Classes(), EVALUATED, tmp_path)
    later = EVALUATED | {"train": {"steps": 6, "eval_every_steps": 2}, "checkpoint": {"keep_best": "min eval/lss"}}
    with pytest.raises(LockstepError, match=r"no metric eval/lss\n  remedy: did you mean eval/loss\?"):
        runs.fit(Untrained(), later, tmp_path, allow_change=["task"])


@pytest.mark.parametrize("head", mainly(["loss/b", "samples"], ["loss", "loss/a", "loss/b", "samples"]))
def test_any_result_may_be_kept_by_also_where_the_first_samples_have_no_unit(tmp_path, head):
    class NoUnits(own_tasks.TwoHeads):
        def eval_data(self):
            data = super().eval_data()
            data.tensors[2][::8] = False  # what the dry run reads
            return data

    settings = EVALUATED | {"checkpoint": {"keep_best": f"max eval/{head}"}}
    assert f"eval/{head}" in runs.fit(NoUnits(eval_length=64), settings, tmp_path)[1]


def test_metrics_that_need_more_samples_are_told_and_no_error(tmp_path):
    class Many(own_tasks.Classes):
        def metrics(self):
            from torchmetrics import MeanMetric

            class OfMany(MeanMetric):
                def compute(self):
                    if self.weight < 20:
                        raise RuntimeError("more than 20 samples are required")
                    return super().compute()

            return Metrics(OfMany(), lambda metrics, output, batch: metrics.update(output[:, 0]))

    settings = EVALUATED | {"checkpoint": {"keep_best": "max eval/OfMany"}}
    assert runs.fit(Many(), settings, tmp_path)[1]["eval/OfMany"] > 0
    log = (tmp_path / "train.log").read_text()
    assert (
        log.count(
            "warning: the metrics of 8 samples cannot be computed (RuntimeError: more than 20 samples are required)"
        )
        == 1
    )


def test_outputs_that_cannot_be_predicted_are_told_and_no_error(tmp_path):
    class Overall(own_tasks.Classes):
        def metrics(self):
            from torchmetrics import MeanMetric

            return Metrics(MeanMetric(), lambda metrics, output, batch: metrics.update(output))

        def predict(self, model, batch):
            return super().predict(model, batch).mean()

    runs.fit(Overall(), EVALUATED, tmp_path)
    assert "warning: Task.predict gave an output of shape () for 8 samples" in (tmp_path / "train.log").read_text()


# ---- no trace


def fit_with_and_without(kind, settings, folder):
    """Weights, buffers and optimizer state of a training with the dry run, and of one without it."""
    from lockstep.core.checkpoint import files, store

    before_first_step, found = lockstep.parts.checks.run_checks.RunChecks.before_first_step, []
    for name in ("first", "with", "without"):  # in the first of a process, some import draws random numbers
        if name == "without":
            lockstep.parts.checks.run_checks.RunChecks.before_first_step = lambda *_: []
        try:
            runs.fit(kind(eval_length=20), settings, folder / name)
            found.append((random.random(), np.random.rand(), torch.rand(1).item()))
        finally:
            lockstep.parts.checks.run_checks.RunChecks.before_first_step = before_first_step
        saved = store.listed(folder / name / "checkpoints")[0]
        found.append({name: tensor.numpy().tobytes() for name, tensor in files.read(saved.path, saved.index)})
    return found[2:]


@pytest.mark.parametrize("fails", [False, True])
def test_generators_modes_and_gradients_are_as_they_were(fails):
    world, model = World(0, 1, 0, torch.device("cpu")), Frozen(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    model[1].register_buffer("mask", torch.tensor([1.0, float("-inf")]))
    modes, buffers = (
        [module.training for module in model.modules()],
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    with contextlib.suppress(KeyError), dry_run.without_trace(model, world, compiled=False):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(1), random.random(), np.random.rand(), torch.manual_seed(5)
        model[1].mask.fill_(2)
        model[1].running_mean = torch.ones(3)
        if fails:
            raise KeyError
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


TRACES = runs.config(train={"steps": 3, "eval_every_steps": 3})


@pytest.mark.parametrize("workers", mainly([0], [0, 1]))
def test_it_leaves_no_trace(tmp_path, workers):
    one, first, other, second = fit_with_and_without(Normed, TRACES | {"data": {"workers": workers}}, tmp_path)
    assert one == other
    assert first == second
    assert any("passes" in name for name in first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", mainly(["fsdp"], ["ddp", "fsdp"]))
def test_it_leaves_no_trace_on_ranks(tmp_path, strategy):
    settings = TRACES | {"parallel": {"strategy": strategy}}
    for one, first, other, second in run_ranks(2, fit_with_and_without, own_tasks.Deep, settings, tmp_path):
        assert one == other
        assert first == second


def test_a_restart_does_without(tmp_path):
    class Counting(own_tasks.Classes):
        evaluated = 0

        def loss(self, model, batch):
            self.evaluated += not model.training
            return super().loss(model, batch)

    first, second = Counting(), Counting()
    settings = runs.config(train={"steps": 4, "eval_every_steps": 4})
    runs.fit(first, settings | {"checkpoint": {"every_steps": 2}}, tmp_path)
    runs.fit(second, settings | {"train": {"steps": 6, "eval_every_steps": 6}}, tmp_path)
    # A batch and its halves, some evaluation samples, and a sample for model.txt and for each of the model's traces.
    assert first.evaluated == 3 + 1 + 1 + second.evaluated


# ---- the mode in which a model is trained


class Frozen(nn.Sequential):
    """The usual override: BatchNorm stays in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class FrozenNorm(own_tasks.Plain):
    def model(self):
        self.built = Frozen(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5)).to(self.dtype)
        self.built[1].running_mean += 0.5
        return self.built


class LeftInEvaluation(own_tasks.Plain):
    def model(self):
        self.built = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)).to(
            self.dtype
        )
        self.built[1].eval()
        self.built[2].eval()
        return self.built


class WholeInEvaluation(LeftInEvaluation):
    """As `from_pretrained` leaves a model."""

    def model(self):
        return super().model().eval()


@pytest.mark.parametrize("task", mainly([FrozenNorm], [FrozenNorm, LeftInEvaluation, WholeInEvaluation]))
def test_a_training_is_the_same_with_and_without_evaluations(tmp_path, monkeypatch, task):
    weights = []
    for every in (0, 5):
        settings = runs.config(train={"steps": 12, "eval_every_steps": every})
        weights.append(runs.fit(task(eval_length=20), settings, tmp_path / str(every))[0])
        monkeypatch.setattr(
            lockstep.parts.checks.run_checks.RunChecks, "before_first_step", lambda *_: []
        )  # it may hide what the loop does not do
    assert runs.difference(*weights) == 0
    assert (int(weights[0]["1.num_batches_tracked"]) == 0) == (task is FrozenNorm)
    note = "note: Task.model left 1 and 1 more module in evaluation mode; "
    note += "training puts the whole model into training mode"
    assert (note in (tmp_path / "0" / "train.log").read_text()) == (task is LeftInEvaluation)
