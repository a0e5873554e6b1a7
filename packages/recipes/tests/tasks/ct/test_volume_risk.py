"""The task of risks from CT volumes: batches, losses and outputs, in one process."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from lockstep import LockstepError
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.outputs import largest_weights
from tests import risk_cases, runs
from tests.risk_cases import OPTIONS, UNEVEN, make_task, volume_table

PLAIN = {"augment": None, "train_slices": "even"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return volume_table(tmp_path_factory.mktemp("volumes"))


def batch_of(task, data, indices, training=False):
    return task.collate([task.prepare(data[index], 0, training) for index in indices])


def test_a_batch_has_the_slices_of_all_volumes_one_after_another(table):
    task = make_task({}, table)
    data = task.train_data()
    batch = batch_of(task, data, [0, 3, 5], training=True)
    lengths = [min(6, len(data[index].slices)) for index in (0, 3, 5)]
    assert batch["counts"].tolist() == lengths
    assert batch["longest"] == max(lengths) == 6
    assert batch["slices"].shape == (sum(lengths), 3, 16, 16)
    assert batch["slices"].dtype == torch.uint8
    assert batch["index"].tolist() == [0, 3, 5]
    positions = torch.from_numpy(data[0].positions)[batch["places"][:6]]
    assert torch.equal(batch["positions"][:6], positions)
    assert (
        torch.equal(batch["labels"], torch.from_numpy(data.labels[[0, 3, 5]]).float()) or batch["labels"].isnan().any()
    )


@pytest.mark.parametrize("reduction", ["question", "patient"])
def test_the_loss_is_that_of_plain_torch_over_known_labels(table, reduction):
    weights = {"death_1y": 2.0, "relapse_2y": 0.5}
    task = make_task(PLAIN | {"reduction": reduction, "positive_weights": weights}, table)
    torch.manual_seed(0)
    model, data = task.model(), task.train_data()
    batch = batch_of(task, data, range(len(data)), training=True)
    logits, labels = model(batch).logits, batch["labels"]
    expected, units = 0.0, 0
    for row in range(len(data)):
        terms = [
            functional.binary_cross_entropy_with_logits(
                logits[row, place],
                labels[row, place].double(),
                pos_weight=torch.tensor(weights.get(name, 1.0)).double(),
            )
            for place, name in enumerate(risk_cases.QUESTIONS)
            if not math.isnan(labels[row, place])
        ]
        expected = expected + (sum(terms) if reduction == "question" else sum(terms) / len(terms))
        units += len(terms) if reduction == "question" else 1
    assert torch.allclose(task.loss(model.train(), batch)[0], expected, rtol=1e-12)
    assert float(task.weight(batch)) == units


def test_balanced_weights_are_negatives_over_positives(table):
    assert make_task({"positive_weights": "balanced"}, table).about.positive_weights == pytest.approx([7.0, 2 / 3, 1.0])
    with pytest.raises(LockstepError, match=r"no question 'deaht_1y'(?s:.*)death_1y"):
        _ = make_task({"positive_weights": {"deaht_1y": 2.0}}, table).about


def test_all_slices_in_groups_give_the_mean_of_the_logits(table):
    task = make_task({"eval_slices": "all"}, table)
    torch.manual_seed(0)
    model, data = task.model().eval(), task.train_data()
    sample = data[0]
    batch = batch_of(task, data, [1, 0, 2])
    assert batch["groups"].tolist() == [1, 3, 1]
    with torch.no_grad():
        output = task.predict(model, batch)
        logits, seen = 0, []
        for first in range(3):
            places = np.arange(len(sample.slices))[first::3]
            seen += places.tolist()
            part = {
                "slices": task._pictures(sample, places, changes=False),
                "counts": torch.tensor([len(places)]),
                "positions": torch.from_numpy(sample.positions[places]),
            }
            logits = logits + model(part).logits[0] / 3
    assert sorted(seen) == list(range(14))
    assert torch.allclose(output["risks"][1], logits.sigmoid(), rtol=1e-10)


def test_the_output_has_the_slices_with_the_largest_weights_from_feet_to_head():
    attention = torch.tensor([0.1, 0.6, 0.3, 0.5, 0.5, *torch.arange(8) / 28])
    counts = torch.tensor([3, 2, 8])
    places = torch.tensor([0, 4, 9, 2, 1, *range(8)])
    batch = {"places": places, "positions": places * 2.5}
    output = largest_weights(batch, attention, counts, 6)
    assert output["slices"].tolist() == [[0, 4, 9, -1, -1, -1], [1, 2, -1, -1, -1, -1], [2, 3, 4, 5, 6, 7]]
    assert output["attention"][0].tolist() == pytest.approx([0.1, 0.6, 0.3, 0, 0, 0])
    assert output["attention"][2].tolist() == pytest.approx([n / 28 for n in range(2, 8)])
    assert output["positions"][1].tolist() == [2.5, 5.0, 0, 0, 0, 0]


def test_an_output_does_not_depend_on_the_volumes_beside_it(table):
    for options in ({}, {"eval_slices": "all"}):
        task = make_task(options, table)
        torch.manual_seed(0)
        model, data = task.model().eval(), task.train_data()
        with torch.no_grad():
            whole = task.predict(model, batch_of(task, data, range(len(data))))
            for index in range(len(data)):
                alone = task.predict(model, batch_of(task, data, [index]))
                for name, value in alone.items():
                    assert torch.allclose(value[0].double(), whole[name][index].double(), rtol=1e-10, atol=1e-7)


def test_pictures_change_only_after_the_frozen_epochs(table):
    task = make_task({"frozen_epochs": 2, "keep_features": False, "max_slices": 20}, table)
    sample = task.train_data()[0]
    torch.manual_seed(0)
    first, second, third = (task.prepare(sample, epoch, True).pictures for epoch in (0, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "survival", "head": "question"}, "head: hazard"),
        ({"loss": "survival", "head": "hazard", "positive_weights": "balanced"}, "loss: answers"),
        ({"windows": ["lung"], "mean": [0.5, 0.5]}, "2 numbers, but there are 1 window"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        VolumeRiskOptions.model_validate(OPTIONS | options)


def test_a_patient_in_both_parts_is_refused_before_the_training(tmp_path):
    train = volume_table(tmp_path / "train")
    evaluation = volume_table(tmp_path / "eval", answers=[("1", "1", ""), ("0", "", "")])
    with pytest.raises(LockstepError, match="2 patients are in both the training and the evaluation data"):
        runs.fit(make_task({}, train, evaluation), runs.config(), tmp_path / "run")


def test_a_run_keeps_the_patients_of_each_part_of_a_fold(tmp_path):
    train = volume_table(tmp_path / "train")
    task = make_task({}, train, fold="2/3")
    task.setup(tmp_path / "kept", trained=False)
    lines = (tmp_path / "kept/patients.csv").read_text().splitlines()
    parts = dict(line.split(",") for line in lines[1:])
    assert lines[0] == "patient,part"
    for part, data in (("train", task.train_data()), ("eval", task.eval_data())):
        assert sorted(data.patients) == sorted(patient for patient, found in parts.items() if found == part)
    assert len(parts) == len(UNEVEN)


def test_without_a_choice_no_risk_falls_from_a_horizon_to_the_next(table):
    falls = []
    for options in ({}, {"head": "question"}):
        task = make_task(options, table)
        torch.manual_seed(0)
        model = task.model().eval()
        with torch.no_grad():
            for parameter in model.head.parameters():
                parameter.mul_(30)
            risks = task.predict(model, batch_of(task, task.train_data(), range(6)))["risks"]
        falls.append(bool((risks[:, 1] < risks[:, 0]).any()))
    assert falls == [False, True]


def test_unusable_volumes_are_named_together_before_the_training(tmp_path):
    train = volume_table(tmp_path / "train")
    np.savez(tmp_path / "train/001.npz", slices=np.zeros((4, 5, 5), np.int16))
    (tmp_path / "train/003.npz").write_bytes(b"no volume")
    with pytest.raises(LockstepError, match=r"2 samples cannot be used(?s:.*)labels.csv(?s:.*)001.npz(?s:.*)003.npz"):
        runs.fit(make_task({}, train), runs.config(), tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [
        {"head": "monotone"},
        pytest.param({"head": "hazard", "loss": "survival", "reduction": "patient"}, marks=pytest.mark.exhaustive),
        pytest.param({"aggregator": {"name": "attention", "width": 8}}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"aggregator": {"name": "mean"}, "windows": ["lung", [40, 400]], "slices_per_chunk": 4},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_kind_of_model_and_loss_learns(table, options):
    task = make_task(PLAIN | options, table)
    settings = runs.config(batch={"global": 10}, train={"steps": 60}, log={"every_steps": 1})
    _, results = runs.fit(task, settings)
    torch.manual_seed(0)
    model = task.model()
    batch = batch_of(task, task.train_data(), range(10), training=True)
    before = (task.loss(model.train(), batch)[0] / task.weight(batch)).item()
    assert results["train/loss"] < 0.8 * before
