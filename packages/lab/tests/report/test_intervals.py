"""`lockstep compare --evaluate`: results without parts of the samples, their intervals, and the verdict."""

import itertools
import math
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep_lab.report import judgement, left_out, run
from lockstep_lab.report.intervals import EvaluatedRun, _quantile, differences, verdicts
from packages.lab.tests.report.cases import write_run

NAME = "eval/accuracy"


def of_values(values, better=1, name=NAME):
    """A run whose result is the mean of values, with each value left out."""
    values = np.asarray(values, dtype=float)
    without = (values.sum() - values) / (len(values) - 1)
    return EvaluatedRun(5, {name: float(values.mean())}, {name: without.tolist()}, {name: better} if better else {})


@pytest.mark.parametrize(
    ("freedom", "known"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (1e5, 1.95999)]
)
def test_quantiles_are_those_of_the_tables(freedom, known):
    assert _quantile(0.975, freedom) == pytest.approx(known, rel=1e-4)


def test_the_interval_of_a_mean_is_that_of_a_paired_t_test():
    draw = np.random.default_rng(0)
    one = draw.normal(size=30)
    other = one + draw.normal(0.2, 0.3, size=30)
    (found,) = differences([of_values(one)], [of_values(other)])
    changes = other - one
    error = changes.std(ddof=1) / math.sqrt(30)
    assert found.interval == pytest.approx((changes.mean() - 2.04523 * error, changes.mean() + 2.04523 * error))
    assert found.freedom == 29


def test_a_result_that_a_part_leaves_without_a_value_has_no_verdict():
    one, other = of_values(np.zeros(10)), of_values(np.ones(10))
    one.without[NAME][3] = float("nan")  # such as the only sample of a class
    found = differences([one], [other])
    assert np.isnan(found[0].interval).all()
    assert verdicts(found, NAME) == {}


def test_ends_of_intervals_are_no_results():
    pair = [of_values(np.arange(10.0) + shift) for shift in (0, 1)]
    results = ["eval/own_low", "eval/recall", "eval/recall_high", "eval/auc", "eval/auc/lung"]  # recall has no interval
    ends = ["eval/auc_low", "eval/auc_high", "eval/auc_low/lung", "eval/auc_high/lung"]
    for one in pair:
        for name in [*results, *ends]:
            one.full[name], one.without[name] = one.full[NAME], one.without[NAME]
    assert [one.name for one in differences(pair[:1], pair[1:])] == [NAME, *results]


def test_there_is_a_letter_for_each_of_many_trainings():
    assert list(itertools.islice(judgement._letters(), 24, 28)) == ["Y", "Z", "A2", "B2"]


def test_a_verdict_names_the_direction_that_a_result_knows():
    one, other = np.zeros(20), np.ones(20) + np.linspace(0, 0.1, 20)
    for better, word in ((1, "better"), (-1, "worse"), (0, "different")):
        found = differences([of_values(one, better)], [of_values(other, better)])
        assert verdicts(found, NAME) == {NAME: word}
    assert verdicts(differences([of_values(one)], [of_values(one)]), NAME) == {}


@pytest.mark.parametrize("runs", [1, 3])
def test_trainings_that_differ_by_chance_are_rarely_called_different(runs):
    """With one run of each, chance is that of the samples; with three, seeds have an effect, too."""
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        hard = draw.normal(size=40)
        seeds = draw.normal(0, 0.3, size=2 * runs) * (runs > 1)
        made = [of_values(hard + seed + draw.normal(0, 0.5, size=40)) for seed in seeds]
        wrong += bool(verdicts(differences(made[:runs], made[runs:]), NAME))
    assert 0.02 < wrong / 400 < 0.07


def test_of_many_results_rarely_one_is_called_different():
    draw = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        sides = []
        for _ in range(2):
            parts = [of_values(draw.normal(size=30), name=f"eval/iou/{number}") for number in range(20)]
            full = {name: value for part in parts for name, value in part.full.items()}
            sides.append(EvaluatedRun(5, full, {name: value for part in parts for name, value in part.without.items()}))
        wrong += bool(verdicts(differences(sides[:1], sides[1:]), "eval/loss"))
    assert 0.01 < wrong / 200 < 0.09


def test_runs_that_differ_in_their_seeds_are_one_training(tmp_path):
    def letters(*changes):
        folders = [write_run(tmp_path / str(number), **change) for number, change in enumerate(changes)]
        return judgement._by_training([run.read(folder) for folder in folders])

    low, high = {"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2}}
    assert letters(low | {"seed": 0}, high | {"seed": 0}, low | {"seed": 1}) == [[0, 2], [1]]
    assert letters(low | {"seed": 0}, low | {"seed": 1}) == [[0], [1]]  # all are one training: compare the runs
    assert letters(low | {"seed": 0}, low | {"seed": 0}, high | {"seed": 0}) == [[0], [1], [2]]  # no other seed


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for lr in (0.003, 0.0001):
        config = config_file.load(
            "digits", [f"optim.lr={lr}", "train.steps=8", "data.eval_limit=100", "data.workers=0"]
        )
        Trainer(config, run_dir=folder / str(lr), quiet=True).fit()
    return [folder / "0.003", folder / "0.0001"]


def test_parts_that_are_left_out_are_left_out_of_loss_and_metrics(two):
    found = left_out.of_run(two[0])
    trainer = Trainer(config_file.read_run(two[0]), run_dir=two[0], quiet=True)
    expected = trainer.evaluate()
    assert {name: found.full[f"eval/{name}"] for name in ("loss", "accuracy", "macro_f1")} == pytest.approx(
        {name: expected[name] for name in ("loss", "accuracy", "macro_f1")}, rel=1e-6
    )
    data = trainer.task().eval_data()
    places = [place * len(data) // 100 for place in range(100)]
    outputs = trainer.predict()
    logits = [output[0] if isinstance(output, tuple) else output for output in (outputs[place] for place in places)]
    right = np.array([int(one.argmax()) == int(data[place][1]) for one, place in zip(logits, places, strict=True)])
    assert found.full[NAME] == pytest.approx(right.mean())
    parts = len(found.without[NAME])
    for part in range(parts):
        kept = [place for place in range(100) if place % parts != part]
        assert found.without[NAME][part] == pytest.approx(right[kept].mean())
    assert found.better == {"eval/loss": -1, NAME: 1, "eval/accuracy_top5": 1, "eval/macro_f1": 1}


def test_the_command_names_the_better_training(two, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", *map(str, two), "--evaluate", "--out", str(page)], prog_name="lockstep")
    assert done.exit_code == 0, done.output
    assert "eval/loss: the checkpoint B is worse than A" in done.output
    assert "One run of each does not show which training is better" in done.output
    assert "Evaluated again" in page.read_text()
    refused = CliRunner().invoke(app, ["compare", *map(str, two), "data.eval_limit=9"], prog_name="lockstep")
    assert refused.exit_code == 2
    assert "add --evaluate" in refused.output


def test_runs_with_different_evaluation_data_are_refused(two, tmp_path):
    other = shutil.copytree(two[1], tmp_path / "other")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("eval_limit: 100", "eval_limit: 90"))
    labels, runs = ["one", "two"], [run.read(two[0]), run.read(other)]
    with pytest.raises(UsageError, match="two: it has different evaluation data than one: 90 samples, and one 100"):
        judgement.judge(labels, runs, left_out.of_run)
