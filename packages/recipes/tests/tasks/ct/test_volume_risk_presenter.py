"""How risks from volumes are shown, predicted and exported."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep import Trainer
from lockstep.configs import config_file
from lockstep.core import metric_sync
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.ct import drawings, use_volumes
from lockstep_recipes.tasks.ct.metrics import RiskMetrics
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.presenter import VolumeRiskPresenter
from lockstep_recipes.tasks.ct.report import risk_report
from lockstep_recipes.tasks.ct.volume_inputs import read_volume_inputs
from lockstep_recipes.tasks.ct.volumes.windows import NAMED, HounsfieldWindow, windowed
from packages.recipes.tests.tasks.ct.test_volume_risk_metrics import OUTCOMES, QUESTIONS, computed, made_up
from tests import export_cases

COUNTS = [5, 9, 12, 7, 6, 11, 8, 5]
NAMES = ["death_1y", "death_3y"]
ANSWERS = ["0,0", "0,1", "1,1", "0,", ",", "0,0", "1,1", "0,1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight volumes of noise with a ball in it, and their table; two of them are for evaluation."""
    folder = tmp_path_factory.mktemp("volumes")
    random = np.random.default_rng(0)
    rows = ["patient,image,split,death_1y,death_3y"]
    for number, count in enumerate(COUNTS):
        across, down = np.mgrid[:40, :33]
        ball = (across - 20) ** 2 + (down - 15) ** 2 < 30 + 20 * number
        slices = random.normal(-300, 200, (count, 40, 33)) + 500 * ball
        positions = np.cumsum(random.uniform(1, 4, count)).astype(np.float32)
        np.savez(
            folder / f"{number}.npz",
            slices=slices.astype(np.int16),
            positions=positions - positions[0],
            spacing=[2, 1, 1],
        )
        rows.append(f"p{number},{number}.npz,{'val' if number in (2, 5) else 'train'},{ANSWERS[number]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def settings(folder, **task):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 8,
    }
    return config_file.parse(
        {
            "task": {
                "kind": "volume_risk",
                "scratch": {"architecture": "vit", "sizes": sizes},
                "image_size": 16,
                "max_slices": 8,
                "aggregator": {"width": 16, "layers": 2, "heads": 2},
                "resamples": 20,
                **task,
            },
            "data": {"train": str(folder / "labels.csv")},
            "batch": {"global": 2},
            "train": {"steps": 3, "eval_every_steps": 3},
            "optim": {"name": "AdamW", "lr": 0.01},
            "log": {"writers": ["text_log", "json_lines"], "every_steps": 1, "pictures": 4},
            "device": "cpu",
        }
    )


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    Trainer(settings(folder), run_dir=run_dir, quiet=True).fit()
    return run_dir


def rows_of(run, folder, inputs, by_row=True, to=None):
    rows = []
    Trainer(settings(folder), run_dir=run, quiet=True).predict_rows(
        lambda found, _: rows.extend(found), [str(path) for path in inputs], by_row=by_row, folder=to
    )
    return rows


# ---- a run


def test_a_run_draws_its_patients_and_tells_what_is_undefined(run):
    from PIL import Image

    files = {str(path.relative_to(run)) for path in run.rglob("*.png")}
    assert {"samples/augmented.png", "samples/step-00000003.png", "samples/worst-step-00000003.png"} <= files
    assert "pictures/calibration-step-00000003.png" in files
    assert "pictures/roc-step-00000003.png" in files, "death_1y has both answers"
    assert np.asarray(Image.open(run / "samples" / "step-00000003.png")).shape[1] > 500
    log = (run / "train.log").read_text()
    assert "scores by question; sensitivity and specificity at risk 0.5:" in log
    arrays = json.loads((run / "metric_arrays.jsonl").read_text())
    assert arrays["label_counts"] == [[2, 1, 1], [2, 1, 1]]
    assert "training: 5 volumes of 5 patients" in log
    assert "left out: 1 row without a known label" in log
    assert "fewer than 10 labels of yes or no" in log
    entry = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert entry["eval/samples"] == 2
    assert all(value is not None for value in entry.values())
    assert entry["memory/before_evaluation_mb"] > 0
    assert entry["memory/after_evaluation_mb"] > 0


def test_rows_have_the_risks_and_the_slices_that_mattered(run, folder, tmp_path):
    (table_row,) = rows_of(run, folder, [folder / "2.npz"], to=tmp_path)
    assert table_row["input"] == str(folder / "2.npz")
    assert table_row["patient"] == "2.npz"
    assert all(0 < table_row[f"risk/{name}"] < 1 for name in NAMES)
    weights = [table_row[f"slice_{place}_attention"] for place in (1, 2, 3)]
    assert weights == sorted(weights, reverse=True)
    positions = np.load(folder / "2.npz")["positions"]
    for place in (1, 2, 3):
        assert table_row[f"slice_{place}_mm"] == positions[table_row[f"slice_{place}"]]
    assert [path.suffix for path in (tmp_path / "risks").iterdir()] == [".png"]
    (described,) = rows_of(run, folder, [folder / "2.npz"], by_row=False)
    assert described["risks"]["death_1y"] == round(table_row["risk/death_1y"], 4)
    assert described["slices"][0]["slice"] == table_row["slice_1"]


def test_a_table_and_its_files_give_the_same_risks(run, folder):
    files = [folder / f"{number}.npz" for number in range(len(COUNTS))]
    by_file = rows_of(run, folder, files)
    by_table = rows_of(run, folder, [folder / "labels.csv"])
    by_folder = rows_of(run, folder, [folder])
    assert [row["patient"] for row in by_table] == [f"p{number}" for number in range(8)]
    for name in NAMES:
        risks = [row[f"risk/{name}"] for row in by_file]
        assert [row[f"risk/{name}"] for row in by_table] == risks
        assert [row[f"risk/{name}"] for row in by_folder] == risks


EXPORTED = {
    "question": {},
    "monotone": {
        "head": "monotone",
        "eval_slices": "all",
        "keep_shape": True,
        "slice_distance_mm": 2.0,
        "aggregator": {"name": "mean"},
    },
    "hazard": {"head": "hazard", "slice_distance_mm": 2.0, "aggregator": {"name": "attention", "width": 16}},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [("monotone",), ("question", "hazard")])
def test_an_export_gives_the_same_risks_without_lockstep(folder, tmp_path, heads):
    inputs = [str(folder / "2.npz"), str(folder / "0.npz")]  # 12 slices, of which 8 are chosen; and 5 slices
    rows, wanted = {}, {}
    for name in heads:
        trainer = Trainer(settings(folder, **EXPORTED[name]), run_dir=tmp_path / name, quiet=True)
        trainer.fit()
        trainer.export(tmp_path / f"{name}-out")
        rows[name] = []
        trainer.predict_rows(lambda found, _, rows=rows[name]: rows.extend(found), inputs)
        wanted[name] = tmp_path / f"{name}-out", inputs
    answers = export_cases.without_lockstep(wanted)
    for name in heads:
        for row, answer in zip(rows[name], answers[name], strict=True):
            assert list(answer["risks"]) == NAMES
            for question, risk in answer["risks"].items():
                assert risk == pytest.approx(row[f"risk/{question}"], abs=2e-6)
            assert sum(one["attention"] for one in answer["slices"]) == pytest.approx(1, abs=1e-5)
            best = max(answer["slices"], key=lambda one: one["attention"])
            assert best["attention"] == pytest.approx(row["slice_1_attention"], abs=2e-6)
            assert any(one["slice"] == row["slice_1"] and one["mm"] == row["slice_1_mm"] for one in answer["slices"])
        with pytest.raises(NotImplementedError, match="out of meta"):  # the device that computes nothing
            use_volumes.predict(inputs[0], folder=wanted[name][0], device="meta")


def test_an_export_has_the_levels_of_lockstep_for_every_value():
    values = np.arange(-32768, 32768).astype(np.int16).reshape(256, 256)
    windows = [*NAMED.values(), HounsfieldWindow(37.5, 333.3)]
    about = {"windows": [window._asdict() for window in windows], "image_size": 256, "keep_shape": False}
    levels = use_volumes._picture(values, about).numpy()
    np.testing.assert_array_equal(levels, windowed(values, tuple(windows)).transpose(2, 0, 1))


# ---- inputs


def inputs(*arguments):
    return read_volume_inputs([str(path) for path in arguments], NAMES, VolumeRiskOptions())


def test_inputs_are_files_folders_patterns_and_tables(folder, tmp_path):
    assert inputs(folder).names == [str(folder / f"{number}.npz") for number in range(8)]
    assert len(inputs(folder / "[12].npz")) == 2
    both = inputs(folder / "3.npz", folder / "labels.csv")
    assert len(both) == 8, "a volume that is named twice is read once"
    assert both.names[:2] == [str(folder / "3.npz"), "0.npz"]
    assert both.where(1) == str(folder / "0.npz")
    assert np.isnan(both.labels).all()
    assert both[0].slices.shape == (7, 40, 33)
    with pytest.raises(UsageError, match="no file in this folder"):
        inputs(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        inputs(tmp_path / "absent.nii.gz")


def test_a_table_for_prediction_needs_no_labels(folder, tmp_path):
    (tmp_path / "list.csv").write_text(f"volume\n{folder / '1.npz'}\n")
    assert len(inputs(tmp_path / "list.csv")) == 1
    (tmp_path / "list.csv").write_text(f"volume\n{folder / 'absent.npz'}\n")
    with pytest.raises(DataError, match=r"absent\.npz"):
        inputs(tmp_path / "list.csv")
    with (tmp_path / "other.csv").open("w") as file:
        csv.writer(file).writerows([["age"], ["3"]])
    with pytest.raises(DataError, match="image"):
        inputs(tmp_path / "other.csv")


def test_each_folder_with_a_series_is_a_volume(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.dcm").write_bytes(b"x")
    assert inputs(tmp_path).names == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert inputs(tmp_path / "b").patients == ["b"]
    (tmp_path / "README.md").write_text("two series")
    (tmp_path / "b" / "more").mkdir()
    (tmp_path / "b" / "more" / "2").write_bytes(bytes(128) + b"DICM")
    (tmp_path / "c" / "more").mkdir(parents=True)
    (tmp_path / "c" / "more" / "2").write_bytes(bytes(128) + b"DICM")
    assert inputs(tmp_path).names == [str(tmp_path / name) for name in ("a", "b", "c/more")]


# ---- text and images


def test_the_report_says_undefined_and_why():
    risks, labels = made_up(60)
    labels[0, 1], risks[0, 1] = 1, np.nan
    values = computed(RiskMetrics(QUESTIONS, outcomes=OUTCOMES, resamples=20), risks, labels)
    text = risk_report(values, QUESTIONS, threshold=0.5)
    lines = {line.split()[0].rstrip(":"): line for line in text.splitlines()[2:8]}
    assert f"{float(values['auc/death_1y']):.4f} (" in lines["death_1y"]
    assert "undefined" in lines["never"]
    assert "nan" not in text
    assert "never: AUC and average precision are undefined, because only no is known" in text
    assert "always: AUC and average precision are undefined, because only yes is known" in text
    assert "unknown: AUC and average precision are undefined, because no label is known" in text
    assert "death_2y: undefined, because 1 of" in text
    assert metric_sync.flatten(values).keys().isdisjoint({"auc/never", "auc/always", "auc/unknown"})


def test_the_bar_of_a_slice_is_as_wide_as_its_weight():
    slices = np.zeros((3, 20, 10), np.uint8)
    drawn = drawings.strip(slices, np.array([0.0, 2.0, 4.0]), np.array([0.1, 0.2, 0.4]))
    orange = (drawn == np.array([230, 120, 20])).all(axis=2)
    rows = orange.sum(axis=1).max()
    assert rows == 32 + 64 + 128
    assert drawings.strip(slices, np.zeros(3)).shape[0] < drawn.shape[0]


def test_the_most_attended_slices_stay_in_order():
    assert drawings.most_attended(np.array([0.1, 0.4, 0.1, 0.3]), 3).tolist() == [0, 1, 3]


def test_curves_are_drawn_of_what_is_defined():
    risks, labels = made_up(60)
    values = computed(RiskMetrics(QUESTIONS, resamples=0), risks, labels)
    task = SimpleNamespace(questions=QUESTIONS)
    assert set(VolumeRiskPresenter(task).pictures(values)) == {"roc", "calibration"}
    only = computed(RiskMetrics(["never"], resamples=0), risks[:, 3:4], labels[:, 3:4])
    assert set(VolumeRiskPresenter(SimpleNamespace(questions=["never"])).pictures(only)) == {"calibration"}
    assert drawings.risk_curve(np.zeros(2), None, {}) is None


def test_a_mistake_is_the_loss_over_known_labels():
    output = {"risks": torch.tensor([[0.5, 0.9], [0.2, 0.2], [0.3, 0.3]])}
    nan = float("nan")
    labels = torch.tensor([[1.0, nan], [0.0, 1.0], [nan, nan]])
    found = VolumeRiskPresenter(SimpleNamespace()).mistakes(output, {"labels": labels}).tolist()
    expected = [-np.log(0.5), (-np.log(0.8) - np.log(0.2)) / 2, -np.inf]
    assert found == pytest.approx(expected, rel=1e-6)
