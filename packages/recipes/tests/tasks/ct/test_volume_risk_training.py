"""Trainings of risks from CT volumes: on ranks, killed, on real scans, and from the command line."""

import csv
import functools
import json
from pathlib import Path

import pytest
import torch

from lockstep.core.errors import UsageError
from packages.recipes.tests.tasks.ct.volumes.scans import write_dicom, write_nifti
from tests import rank_cases, risk_cases, runs
from tests.ranks import RankFailed, run_ranks
from tests.risk_cases import OPTIONS, PHASES, make_task, volume_table
from tests.selection import mainly

PLAIN = {"augment": None, "train_slices": "even"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return volume_table(tmp_path_factory.mktemp("volumes"))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    answers = [
        ("1", "1", "0"),
        ("0", "", "1"),
        ("", "0", ""),
        ("0", "1", "0"),
        ("", "", "1"),
        ("0", "0", ""),
        ("1", "", ""),
    ]
    table = volume_table(tmp_path_factory.mktemp("held_out"), answers=answers, seed=1)
    Path(table).write_text(Path(table).read_text().replace("\np", "\nq"))  # other patients
    return table


def rows_of(table):
    return list(csv.DictReader(Path(table).read_text().splitlines()))


# ---- the gradient


def largest_difference(one, other):
    """Absolute: the gradient of the keys' bias is zero but for rounding, and so is the bias."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


SGD = {"optim": {"name": "SGD", "lr": 0.1, "weight_decay": None}}


BALANCED = {"reduction": "question", "positive_weights": "balanced"}
SURVIVAL = {"reduction": "question", "head": "hazard", "loss": "survival", "slices_per_chunk": 4}
CUTS = [(1, "single", 10), (2, "ddp", 1), (3, "ddp", 2), (2, "fsdp", 2)]
CASES = [(options, *cut) for options in (BALANCED, {"reduction": "patient"}, SURVIVAL) for cut in CUTS]
CHOSEN = [(BALANCED, 1, "single", 10), (SURVIVAL, 2, "fsdp", 2)]


@pytest.mark.parametrize(("options", "world", "strategy", "micro"), mainly(CHOSEN, CASES))
def test_a_step_with_uneven_labels_and_slices_is_that_of_plain_torch(table, options, world, strategy, micro):
    """One volume has three labels and up to six slices, most others one label and few slices."""
    task = make_task(PLAIN | options, table)
    model = risk_cases.gradient_by_hand(task)
    with torch.no_grad():
        expected = {name: value - 0.1 * value.grad for name, value in model.named_parameters()}
    settings = {"train": {"steps": 1}, **SGD}
    cut = runs.config(batch={"global": 10, "micro": micro}, parallel={"strategy": strategy}, **settings)
    for weights, _ in run_ranks(world, risk_cases.fit, PLAIN | options, table, None, cut):
        assert largest_difference(weights, expected) < 1e-12


@pytest.mark.parametrize(
    ("world", "strategy", "micro"), mainly([(2, "ddp", 1)], [(2, "ddp", 1), (2, "fsdp", 2), (3, "ddp", 2)])
)
def test_random_slices_and_pixels_are_the_same_on_any_ranks(table, world, strategy, micro):
    options = {"train_slices": "stratified", "frozen_epochs": 1, "keep_features": False}
    train = {"train": {"steps": 8, "unfreeze": PHASES}, **SGD}
    reference, _ = runs.fit(make_task(options, table), runs.config(batch={"global": 4}, **train))
    settings = runs.config(batch={"global": 4, "micro": micro}, parallel={"strategy": strategy}, **train)
    for weights, _ in run_ranks(world, risk_cases.fit, options, table, None, settings):
        assert largest_difference(weights, reference) < 1e-12


# ---- evaluation


@pytest.mark.parametrize("slices", mainly(["all"], ["even", "all"]))
def test_every_evaluation_volume_counts_once_on_any_ranks(table, held_out, slices):
    options = {"eval_slices": slices, "resamples": 50}
    settings = runs.config(batch={"global": 4, "micro": 2}, train={"steps": 1, "eval_every_steps": 1})
    settings |= {"optim": {"name": "SGD", "lr": 1e-30}}
    _, reference = runs.fit(make_task(options, table, held_out), settings)
    expected = {name: value for name, value in reference.items() if name.startswith("eval/")}
    assert expected["eval/samples"] == 7
    assert {"eval/auc/death_1y", "eval/brier/relapse_2y", "eval/concordance/death", "eval/auc_low/death_1y"} <= set(
        expected
    )
    for world in (2, 3):
        for _, results in run_ranks(world, risk_cases.fit, options, table, held_out, settings):
            assert {name: value for name, value in results.items() if name.startswith("eval/")} == expected


# ---- unfreezing, kept features, kills


KEEPS = {"frozen_epochs": 1, "max_slices": 4}


def phases(strategy):
    return runs.config(
        batch={"global": 4, "micro": 2},  # 3 steps are an epoch
        train={"steps": 8, "unfreeze": PHASES},
        optim={"groups": [{"name": "backbone", "match": ["backbone.*"], "lr": 1e-3}]},
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 1, "mode": "sync"},
    )


@pytest.fixture(scope="module")
def undisturbed(table, tmp_path_factory):
    """A function that gives the final weights of a run with a strategy, never stopped, without kept features."""
    plain, folder = KEEPS | {"keep_features": False}, tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def weights_of(strategy):
        return run_ranks(2, risk_cases.fit_to_the_end, plain, table, phases(strategy), str(folder / strategy))[0][0]

    return weights_of


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "step"),  # in each phase, and the first steps of phases
    [(strategy, step) for strategy in ("ddp", "fsdp") for step in (2, 4, 5, 7, 8)],
)
def test_a_run_killed_in_any_phase_ends_with_the_same_bits(table, undisturbed, tmp_path, strategy, step):
    settings, run = phases(strategy), str(tmp_path / "run")
    with pytest.raises(RankFailed):
        run_ranks(2, risk_cases.fit_and_die, KEEPS, table, settings, run, step, step % 2)
    for weights, _ in run_ranks(2, risk_cases.fit_to_the_end, KEEPS, table, settings, run):
        assert weights.keys() == undisturbed(strategy).keys()
        assert all(torch.equal(weights[name], undisturbed(strategy)[name]) for name in weights)


@pytest.mark.parametrize(
    ("epochs", "unfreeze"),
    [
        (2, PHASES),  # a part of the backbone trains from epoch 1 on
        (1, [{"match": ["backbone.*"], "step": 2}]),  # 3 steps are an epoch
        (1, PHASES[:1]),  # the first layers train from the beginning
        (1, []),
    ],
)
def test_a_backbone_that_trains_in_frozen_epochs_is_an_error_before_the_first_step(table, tmp_path, epochs, unfreeze):
    task = make_task({"frozen_epochs": epochs, "keep_features": False}, table)
    task.loss = None  # no step may begin
    settings = runs.config(batch={"global": 4}, train={"steps": 8, "unfreeze": unfreeze})
    with pytest.raises(UsageError, match=r"backbone\.network\S+ trains from step \d on.*backbone\.\* to stay frozen"):
        runs.fit(task, settings, tmp_path / "run")


# ---- files of every kind


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_the_same_scans_as_nifti_and_as_dicom_train_the_same_weights(tmp_path, strategy):
    tables = {"nifti": volume_table(tmp_path / "scans")}
    task = make_task({}, tables["nifti"])
    rows = rows_of(tables["nifti"])
    for kind in ("nifti", "dicom"):
        lines = [",".join(rows[0])]
        for row, sample in zip(rows, task.train_data(), strict=True):
            values = sample.slices[:]
            name = f"{kind}-{row['patient_id']}" + (".nii.gz" if kind == "nifti" else "")
            write = write_nifti if kind == "nifti" else write_dicom
            write(tmp_path / name, values)
            lines.append(",".join(row.values()).replace(row["image"], name))
        tables[kind] = str(tmp_path / f"{kind}.csv")
        (tmp_path / f"{kind}.csv").write_text("\n".join(lines))
    settings = runs.config(batch={"global": 4, "micro": 2}, train={"steps": 4}, parallel={"strategy": strategy})
    found = {kind: run_ranks(2, risk_cases.fit, {}, tables[kind], None, settings)[0][0] for kind in ("nifti", "dicom")}
    assert all(torch.equal(found["nifti"][name], found["dicom"][name]) for name in found["nifti"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sts", "sts_dicom"])
def test_real_scans_train_from_the_command_line_on_two_ranks(shared_data, tmp_path, kind):
    source, run = shared_data / "ct" / kind / "labels.csv", tmp_path / "run"
    vit = "hidden_size: 16, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 32, patch_size: 14"
    sizes = f"task.scratch.sizes={{{vit}}}"
    settings = (
        "task.image_size=28",
        "task.max_slices=6",
        sizes,
        "task.resamples=20",
        "train.epochs=null",
        "train.steps=6",
    )
    strategy = "ddp" if kind == "sts" else "fsdp"
    more = ("batch.global=2", "train.eval_every_steps=6", f"parallel.strategy={strategy}", "log.writers=[json_lines]")
    arguments = ("train", "ct_small", f"data.train={source}", "--run-dir", run, *settings, *more)
    run_ranks(2, rank_cases.command, *arguments)
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(entry for entry in entries if "eval/samples" in entry)
    assert evaluated["eval/samples"] == (6 if kind == "sts" else 1)
    assert not any("auc" in name for name in evaluated) or kind == "sts"  # one patient has one class


@pytest.mark.exhaustive
def test_six_real_patients_are_learnt_by_heart(shared_data, tmp_path):
    rows = rows_of(shared_data / "ct/sts/labels.csv")
    chosen = [row for row in rows if row["lung_mets_2y"]][:6]
    questions = ["lung_mets_1y", "lung_mets_2y", "death_2y"]
    lines = [",".join(["patient_id", "image", *questions])]
    for row in chosen:
        image = str(shared_data / "ct/sts" / row["image"])
        lines.append(",".join([row["patient_id"], image, *(row[name] for name in questions)]))
    (tmp_path / "six.csv").write_text("\n".join(lines))
    options = OPTIONS | PLAIN | {"image_size": 32, "max_slices": 8}
    task = make_task(options, str(tmp_path / "six.csv"), double=False)
    settings = runs.config(
        batch={"global": 6}, train={"steps": 200}, optim={"lr": 3e-3, "weight_decay": 0.0}, log={"every_steps": 200}
    )
    weights, _ = runs.fit(task, settings)
    model = task.model()
    model.load_state_dict(weights)
    data = task.train_data()
    batch = task.collate([task.prepare(data[index], 0, False) for index in range(6)])
    with torch.no_grad():
        loss, _ = task.loss(model.eval(), batch)
    assert float(loss / task.weight(batch)) < 0.01
