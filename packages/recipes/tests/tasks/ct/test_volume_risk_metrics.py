"""Scores of risks: against scikit-learn, against all pairs counted one by one, and on any number of ranks."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import Metrics, Task
from lockstep.core import metric_sync, task_checks
from lockstep.core.errors import DataError
from lockstep_recipes.tasks.ct import scores
from lockstep_recipes.tasks.ct.metrics import FALSE_POSITIVE_RATES, RiskMetrics, update_risk_metrics
from lockstep_recipes.tasks.ct.report import risk_report
from tests import runs
from tests.ranks import run_ranks
from tests.selection import mainly

QUESTIONS = ["death_1y", "death_2y", "death_5y", "never", "always", "unknown"]
OUTCOMES = {"death": [(1.0, 0), (2.0, 1), (5.0, 2)], "other": [(1.0, 3)]}


def made_up(count, seed=0):
    """Risks with ties and labels, many of them unknown: three horizons, two questions of one class, one unknown."""
    random = np.random.default_rng(seed)
    times = random.exponential(4, count)
    known_until = random.exponential(4, count)
    horizons = np.array([1.0, 2.0, 5.0])
    happened = times[:, None] <= np.minimum(known_until[:, None], horizons)
    free = np.minimum(times, known_until)[:, None] >= horizons
    labels = np.full((count, 6), np.nan)
    labels[:, :3] = np.where(happened, 1.0, np.where(free, 0.0, np.nan))
    labels[:, 3] = np.where(random.random(count) < 0.7, 0.0, np.nan)
    labels[:, 4] = np.where(random.random(count) < 0.7, 1.0, np.nan)
    risks = np.round(1 / (1 + np.exp(times[:, None] - 4 + random.normal(0, 2, (count, 6)))), 2)
    return risks, labels


def computed(metric, risks, labels, indices=None):
    places = np.arange(len(risks)) if indices is None else np.asarray(indices)
    metric.update(torch.from_numpy(risks), torch.from_numpy(labels), torch.from_numpy(places))
    return metric.compute()


# ---- against others


@pytest.mark.parametrize(
    ("count", "seed"), mainly([(40, 0), (500, 1)], [(count, seed) for count in (40, 500) for seed in range(3)])
)
def test_the_scores_are_those_of_scikit_learn(count, seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    from sklearn.calibration import calibration_curve

    risks, labels = made_up(count, seed)
    values = computed(RiskMetrics(QUESTIONS, resamples=0), risks, labels)
    for place, question in enumerate(QUESTIONS[:3]):
        rows = ~np.isnan(labels[:, place])
        risk, label = risks[rows, place], labels[rows, place]
        assert float(values[f"auc/{question}"]) == pytest.approx(sklearn.roc_auc_score(label, risk), abs=1e-12)
        precision = sklearn.average_precision_score(label, risk)
        assert float(values[f"average_precision/{question}"]) == pytest.approx(precision, abs=1e-12)
        assert float(values[f"brier/{question}"]) == pytest.approx(sklearn.brier_score_loss(label, risk), abs=1e-12)
        recall = [sklearn.recall_score(label, risk >= 0.5, pos_label=side) for side in (1, 0)]
        found = [float(values[f"{name}/{question}"]) for name in ("sensitivity", "specificity")]
        assert found == pytest.approx(recall, abs=1e-12)
        across, up, _ = sklearn.roc_curve(label, risk)
        assert values["roc"][place].numpy() == pytest.approx(np.interp(FALSE_POSITIVE_RATES, across, up), abs=1e-12)
        table = values["calibration"][place].numpy()
        table = table[table[:, 2] > 0]
        observed, predicted = calibration_curve(label, risk, n_bins=min(10, int(rows.sum()) // 5), strategy="quantile")
        assert table[:, 0] == pytest.approx(predicted, abs=1e-12)
        assert table[:, 1] == pytest.approx(observed, abs=1e-12)
        assert table[:, 2].sum() == rows.sum()
    areas = [float(values[f"auc/{question}"]) for question in QUESTIONS[:3]]
    assert float(values["auc"]) == pytest.approx(np.mean(areas), abs=1e-12)


def by_pairs(risks, times, events):
    """Harrell's concordance index by all pairs."""
    good = pairs = 0.0
    for first in range(len(risks)):
        for second in range(len(risks)):
            later = times[second] > times[first] or (times[second] == times[first] and not events[second])
            if events[first] and later:
                pairs += 1
                good += 1.0 if risks[first] > risks[second] else 0.5 if risks[first] == risks[second] else 0.0
    return good / pairs


@pytest.mark.parametrize("seed", range(3))
def test_the_concordance_counts_every_pair(seed):
    risks, labels = made_up(120, seed)
    values = computed(RiskMetrics(QUESTIONS, outcomes=OUTCOMES, resamples=0), risks, labels)
    times, events = scores.event_times(labels[:, :3], [1.0, 2.0, 5.0])
    rows, risk = np.isfinite(times), risks[:, :3].mean(axis=1)
    expected = by_pairs(risk[rows], times[rows], events[rows])
    assert 0.5 < expected < 1
    assert float(values["concordance/death"]) == pytest.approx(expected, abs=1e-12)
    assert "concordance/other" not in values, "the AUC says the same of a single horizon"


def survival_times(seed):
    """Risks, times and events of made-up patients."""
    risks, labels = made_up(300, seed)
    times, events = scores.event_times(labels[:, :3], [1.0, 2.0, 5.0])
    rows, risk = np.isfinite(times), risks[:, :3].mean(axis=1)
    return risk[rows], times[rows], events[rows]


# Of scikit-survival 0.28.0, and to the last digit of lifelines 0.30.3, as the next test calls them. They are no
# packages for development: lifelines needs an old pandas, and scikit-survival compiles solvers and loads for seconds.
OF_SURVIVAL_PACKAGES = [0.9340501541047913, 0.9036276659358182, 0.9014608060519108]


@pytest.mark.parametrize("seed", range(3))
def test_the_concordance_is_that_of_survival_packages(seed):
    (found,) = scores.concordance(*survival_times(seed))
    assert found == pytest.approx(OF_SURVIVAL_PACKAGES[seed], abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # the packages'
@pytest.mark.parametrize("seed", range(3))
def test_the_concordance_is_that_of_survival_packages_that_are_installed(seed):
    risk, times, events = survival_times(seed)
    (found,) = scores.concordance(risk, times, events)
    compared = 0
    try:
        from lifelines.utils import concordance_index
    except ImportError:
        pass
    else:
        assert found == pytest.approx(concordance_index(times, -risk, events), abs=1e-12)
        compared += 1
    try:
        from sksurv.metrics import concordance_index_censored
    except ImportError:
        pass
    else:
        assert found == pytest.approx(concordance_index_censored(events, times, risk, tied_tol=0)[0], abs=1e-12)
        compared += 1
    if not compared:
        pytest.skip("neither lifelines nor scikit-survival is installed")


def test_event_times_of_labels():
    labels = np.array([[0, 0, 0], [0, 1, 1], [1, 1, 1], [0, np.nan, 1], [0, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    times, events = scores.event_times(labels, [1.0, 3.0, 6.0])
    assert times[:5].tolist() == [6, 3, 1, 6, 1]
    assert math.isnan(times[5])
    assert events.tolist() == [False, True, True, True, False, False]


def test_known_values():
    risks, labels = np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])
    assert scores.auc(risks, labels).tolist() == [0.875]
    assert scores.roc(risks, labels, np.array([0.0, 0.25, 0.5, 1.0])).tolist() == [0.5, 0.75, 1.0, 1.0]
    assert scores.brier(risks, labels) == pytest.approx((0.01 + 0.16 + 0.36 + 0.04) / 4)
    assert scores.sensitivity_and_specificity(risks, labels, 0.4) == (1.0, 0.5)


# ---- intervals


def test_a_weighted_auc_is_that_of_repeated_rows():
    risks, labels = made_up(60)
    rows = ~np.isnan(labels[:, 1])
    risk, label = risks[rows, 1], labels[rows, 1]
    weights = np.random.default_rng(5).integers(0, 4, (7, len(risk))).astype(float)
    expected = [scores.auc(np.repeat(risk, row.astype(int)), np.repeat(label, row.astype(int)))[0] for row in weights]
    assert scores.auc(risk, label, weights).tolist() == pytest.approx(expected, abs=1e-12)


def test_an_interval_is_the_percentiles_of_resampled_patients():
    """Of 30 patients with two scans each, a resample has both scans or none."""
    risks, labels = made_up(60)
    labels[:, 1] = np.repeat(np.arange(30) % 2, 2)
    patients = [f"patient {number // 2}" for number in range(60)]
    metric = RiskMetrics(QUESTIONS, patients=patients, resamples=200, seed=3)
    values = computed(metric, risks, labels)
    groups = np.unique(patients, return_inverse=True)[1]
    (drawn,) = scores.resamples(groups, 200, 3)
    assert (drawn.sum(axis=1) == 60).all()
    assert (drawn[:, 0::2] == drawn[:, 1::2]).all()
    areas = [
        scores.auc(np.repeat(risks[:, 1], row.astype(int)), np.repeat(labels[:, 1], row.astype(int)))[0]
        for row in drawn
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    assert float(values["auc_low/death_2y"]) == pytest.approx(low, abs=1e-12)
    assert float(values["auc_high/death_2y"]) == pytest.approx(high, abs=1e-12)
    assert low < float(values["auc/death_2y"]) < high
    again = computed(RiskMetrics(QUESTIONS, patients=patients, resamples=200, seed=3), risks, labels)
    other = computed(RiskMetrics(QUESTIONS, patients=patients, resamples=200, seed=4), risks, labels)
    assert float(again["auc_low/death_2y"]) == float(values["auc_low/death_2y"])
    assert float(other["auc_low/death_2y"]) != float(values["auc_low/death_2y"])


def test_resamples_do_not_depend_on_the_memory_that_they_may_use(monkeypatch):
    groups = np.arange(50) // 3
    whole = np.concatenate(list(scores.resamples(groups, 40, 1)))
    monkeypatch.setattr(scores, "_LARGEST", 333)
    parts = list(scores.resamples(groups, 40, 1))
    assert len(parts) > 3
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_score_that_is_undefined_in_most_resamples_has_no_interval():
    assert all(math.isnan(limit) for limit in scores.interval(np.array([0.5, np.nan, np.nan]), 0.95))
    assert scores.interval(np.array([0.5, 0.5, np.nan]), 0.95) == (0.5, 0.5)


# ---- what is undefined has no number


def test_a_question_with_one_class_has_no_auc_and_no_number_stands_in_for_it():
    risks, labels = made_up(80)
    values = computed(RiskMetrics(QUESTIONS, outcomes=OUTCOMES, resamples=20), risks, labels)
    numbers = metric_sync.flatten(values)
    assert all(math.isfinite(value) for value in numbers.values())
    for question in ("never", "always", "unknown"):
        assert not [name for name in numbers if name.startswith(("auc", "average")) and name.endswith(question)]
    assert {"brier/never", "specificity/never", "sensitivity/always"} <= numbers.keys()
    assert {"sensitivity/never", "specificity/always", "brier/unknown"}.isdisjoint(numbers)
    counts = values["label_counts"].numpy()
    assert counts[:, 0].tolist() == (~np.isnan(labels)).sum(0).tolist()
    assert counts[:, 1].tolist() == (labels == 1).sum(0).tolist()
    assert counts[:, 2].tolist() == (labels == 0).sum(0).tolist()
    assert counts[5].tolist() == [0, 0, 0]
    assert values["roc"][3].isnan().all()


def test_a_risk_that_is_not_finite_leaves_its_question_without_numbers():
    risks, labels = made_up(80)
    labels[7, 1], risks[7, 1] = 1.0, np.nan
    values = computed(RiskMetrics(QUESTIONS, outcomes=OUTCOMES, resamples=0), risks, labels)
    assert not [name for name in metric_sync.flatten(values) if name.endswith(("/death_2y", "/death"))]
    assert "auc/death_1y" in values
    assert values["risks_not_finite"][:, 0].tolist() == [0, 1, 0, 0, 0, 0]


def test_patients_whose_risk_falls_with_the_horizon_are_counted():
    """Once, however many scans they have, and also without any known label; of rounding nobody."""
    rising, falling = [0.1, 0.2, 0.2, 0.9], [0.1, 0.3, 0.29, 0.9]
    later, rounded = [0.1, 0.05, 0.3, 0.9], [0.1, 0.2, 0.2 - 1e-9, 0.9]
    risks = np.array([rising, falling, falling, later, rounded])
    labels = np.array([[0.0, 0, 1, 0]] * 4 + [[np.nan] * 4])
    metric = RiskMetrics(QUESTIONS[:4], outcomes=OUTCOMES, patients=["a", "b", "b", "c", "d"], resamples=0)
    values = computed(metric, risks, labels)
    assert float(values["falling_risks"]) == 2
    text = risk_report(values, QUESTIONS[:4], threshold=0.5)
    assert "patients whose risk decreases from a horizon to a later one: 2 of 4; task.head=monotone or hazard" in text
    single = computed(RiskMetrics(QUESTIONS[:4], outcomes={"death": [(1.0, 0)]}, resamples=0), risks, labels)
    assert "falling_risks" not in single


def test_a_sample_that_counts_twice_is_an_error():
    risks, labels = made_up(4)
    with pytest.raises(DataError, match="sample 2 was counted twice"):
        computed(RiskMetrics(QUESTIONS), risks, labels, [0, 1, 2, 2])


# ---- ranks


class Scored(Task):
    """Made-up risks: the model adds nothing. Two questions; of the second a single label is positive."""

    def __init__(self, count=11):
        self.risks, labels = (torch.from_numpy(part).float() for part in made_up(count, 3))
        self.labels = labels[:, :3]

    def model(self):
        return nn.Linear(3, 3)

    def train_data(self):
        return [
            {"risks": risks[:3], "labels": labels, "index": index}
            for index, (risks, labels) in enumerate(zip(self.risks, self.labels, strict=True))
        ]

    eval_data = train_data

    def loss(self, model, batch):
        return model(batch["risks"]).square().sum()

    def predict(self, model, batch):
        return {"risks": batch["risks"]}

    def metrics(self):
        patients = [str(number // 2) for number in range(len(self.risks))]
        metric = RiskMetrics(QUESTIONS[:3], outcomes={"death": OUTCOMES["death"]}, patients=patients, resamples=50)
        return Metrics({"risk": metric}, update_risk_metrics)


def results_of(settings):
    """The results of an evaluation."""
    _, logged = runs.fit(Scored(), settings)
    return {name: value for name, value in logged.items() if name.startswith("eval/")}


def test_metrics_are_identical_on_any_number_of_ranks():
    for micro in (2, 4):
        settings = runs.config(
            batch={"global": 12, "micro": micro},
            train={"steps": 1, "eval_every_steps": 1},
            optim={"name": "SGD", "lr": 1e-30},
        )
        (reference,) = run_ranks(1, results_of, settings)
        assert {
            "eval/auc",
            "eval/auc_low/death_1y",
            "eval/brier/death_5y",
            "eval/concordance/death",
        } <= reference.keys()
        assert reference["eval/samples"] == 11
        json.dumps(reference, allow_nan=False)
        for world in (2, 3):
            for results in run_ranks(world, results_of, settings):
                assert results == reference


def test_the_best_checkpoint_may_be_chosen_by_a_score_that_few_samples_lack(tmp_path):
    """The first samples, which are evaluated before the first step, have too few labels for an AUC."""
    settings = runs.config(
        batch={"global": 11, "micro": 1},
        train={"steps": 2, "eval_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_best": "max eval/auc/death_5y"},
    )
    _, logged = runs.fit(Scored(), settings, tmp_path)
    assert 0 <= logged["eval/auc/death_5y"] <= 1
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(value is not None for entry in entries for value in entry.values())
    arrays = json.loads((tmp_path / "metric_arrays.jsonl").read_text().splitlines()[0])
    assert {"label_counts", "calibration", "roc"} <= arrays.keys()


def test_the_names_of_possible_results_are_those_of_results():
    risks, labels = made_up(200)
    metric = RiskMetrics(QUESTIONS[:3], outcomes=OUTCOMES, resamples=20)
    numbers = metric_sync.flatten(computed(metric, risks[:, :3], labels[:, :3]))
    assert set(numbers) == set(metric.possible_results)


def test_the_metrics_of_a_task_are_taken_as_they_are():
    metrics, update = task_checks.metrics(Scored())
    assert update is update_risk_metrics
    assert isinstance(metrics["risk"], RiskMetrics)
