"""Exports say without Lockstep what the run says: `model.pt2` and `use_model.py` of every kind of model."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.cli.export import next_step
from lockstep_recipes.tasks.vision import use_images
from packages.recipes.tests.tasks.text.test_text import ROWS, table
from packages.recipes.tests.tasks.vision.test_segmentation_models import ARCHITECTURES
from tests import detector_cases, export_cases, own_tasks, runs
from tests.box_cases import SMALL, box_folder
from tests.image_cases import RESNET, picture_folder
from tests.mask_cases import UNET, shapes_folder
from tests.selection import mainly

ROUNDING = 1e-5
BOXES = {"score_threshold": 0.0, "most_boxes": 40}
SEEN_SMALLER = {"augment": {"interpolation": "bicubic"}, "eval_size": 24, "eval_resize": 28}
SETTINGS = {
    "digits": {"task": {"kind": "classification", "channels": 1}, "data": {"train": "digits"}},
    "convnet": {
        "task": {"kind": "classification", "image_size": 16, **SEEN_SMALLER},
        "data": {"train": "c", "cache": "decoded", "cache_size": 40},
        "train": {"steps": 4, "ema_decay": 0.5},
    },
    "resnet": {
        "task": {"kind": "classification", "image_size": 20, "scratch": RESNET, "batch_norm": "group"},
        "data": {"train": "c"},
        "compute": {"channels_last": True},
    },
    "unet": {
        "task": {"kind": "segmentation", "scratch": UNET, "image_size": 32, "flip_at_evaluation": True},
        "data": {"train": "s"},
    },
    "windows": {
        "task": {"kind": "segmentation", "scratch": UNET, "image_size": 32, "eval_window": 32},
        "data": {"train": "s"},
    },
    "square": {
        "task": {"kind": "segmentation", "scratch": UNET, "image_size": 32, "eval_shape": "square"},
        "data": {"train": "s"},
    },
    "center": {"task": {"kind": "detection", **SMALL, **BOXES}, "data": {"train": "b"}},
    "tiles": {"task": {"kind": "detection", **SMALL, **BOXES, "tile": 40, "nms": 0.3}, "data": {"train": "b"}},
    "text": {"task": {"kind": "text", "eval_fraction": 0.0}, "data": {"train": "t.csv"}},
}
for _name, _sizes in detector_cases.SIZES.items():
    _task = {"kind": "detection", "image_size": 64, "scratch": {"architecture": _name, "sizes": _sizes}, **BOXES}
    SETTINGS[_name] = {"task": _task, "data": {"train": "b"}}
for _name, _options in ARCHITECTURES.items():
    _shape = {"eval_size": 64} if _name == "upernet" else {"eval_shape": "square"} if _name == "dpt" else {}
    _task = {"kind": "segmentation", "image_size": 32, "scratch": {"architecture": _name, **_options}, **_shape}
    # New weights say several classes; after a few steps these models say the class of most pixels alone.
    SETTINGS[_name] = {"task": _task, "data": {"train": "s"}, "optim": {"name": "AdamW", "lr": 1e-6}}
KEPT = ("digits", "unet")
TEXTS = ["good film", "neither", "so so"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    picture_folder(folder / "c", 3)
    shapes_folder(folder / "s")
    box_folder(folder / "b")
    table(folder / "t.csv", ROWS)
    return folder


@pytest.fixture(scope="module")
def found(folder, request):
    """By name, the task, what the run says, and what its export says without Lockstep. One process is enough."""
    test = test_an_export_says_the_same_without_lockstep.__name__
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == test]
    names = list(dict.fromkeys((*names, *KEPT)))  # which other tests look at, also where they run alone
    inputs, wanted, ours = export_cases.pictures(folder / "p"), {}, {}
    for name in dict.fromkeys((*names, "text")):  # another test looks at the export of a text model
        settings = SETTINGS[name]
        source = settings["data"]["train"]
        data = settings["data"] | {"train": source if source == "digits" else str(folder / source)}
        trainer = export_cases.exported(folder / name, settings | {"data": data})
        asked = TEXTS if name == "text" else inputs
        if name == "segformer":  # its program takes 33 x 33 pixels or more
            asked = [path for path in inputs if not path.endswith("wide.png")]
        ours[name] = export_cases.outputs(trainer, asked, alone=name == "conditional_detr")
        wanted[name] = folder / name / "out", [f"text:{text}" for text in asked] if name == "text" else asked
    theirs = export_cases.without_lockstep({name: wanted[name] for name in names})
    return {name: (*ours[name], theirs[name]) for name in names}


@pytest.mark.parametrize("name", mainly(KEPT, SETTINGS))
def test_an_export_says_the_same_without_lockstep(found, folder, name):
    task, ours, answers = found[name]
    if name == "text":
        for row, answer in zip(ours, answers, strict=True):
            said = {one["label"]: one["score"] for one in answer}
            assert [said[label] for label in task.labels] == pytest.approx(row.tolist(), abs=ROUNDING)
        return
    compare = {"classification": same_probabilities, "segmentation": same_masks, "detection": same_boxes}
    for answer in answers:  # all pictures at once; each alone
        compare[SETTINGS[name]["task"]["kind"]](task, ours, answer)
    about = json.loads((folder / name / "out" / "model.json").read_text())
    assert about["torch"] == torch.__version__
    assert about["batch"] is None or name in ("rt_detr", "rt_detr_v2", "d_fine")


@pytest.mark.exhaustive
def test_a_picture_that_is_too_small_for_the_program_is_named(found, folder, tmp_path):
    Image.new("RGB", (40, 5)).save(tmp_path / "tiny.png")
    said = "the image has 40 x 5 pixels, but model.pt2 needs at least 9 x 9; enlarge it, or try `lockstep predict`"
    for pictures, name in (
        (tmp_path / "tiny.png", tmp_path / "tiny.png"),
        ([np.zeros((9, 9, 3), np.uint8), np.zeros((5, 40, 3), np.uint8)], "image 1"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {said}')}"):
            use_images.predict(pictures, folder=folder / "unet" / "out")
    with pytest.raises(AttributeError):  # an error of another kind stays
        use_images.predict([None], folder=folder / "unet" / "out")


def test_the_line_at_the_end_of_an_export_works_when_it_is_pasted(found, folder, capsys):
    line = next_step(folder / "digits" / "out")
    exec(line.replace("IMAGE.jpg", str(folder / "p" / "colour.png")), {})
    assert "'prediction': " in capsys.readouterr().out
    assert "'text-classification', model=" in next_step(folder / "text" / "out")
    assert "trust_remote_code=True" in next_step(folder / "text" / "out")


def same_probabilities(task, ours, answer):
    theirs = torch.tensor([[row["probabilities"][name] for name in task.classes] for row in answer])
    torch.testing.assert_close(theirs, ours, rtol=0, atol=ROUNDING)
    assert [row["prediction"] for row in answer] == [task.classes[place] for place in ours.argmax(1)]
    assert len({row["probability"] for row in answer}) > 3, "the pictures differ"


def same_masks(task, ours, answer):
    several = len(np.unique(np.concatenate([row["classes"].ravel() for row in answer]))) > 1
    assert several or getattr(task.options.scratch, "architecture", "") == "dpt"  # its new weights say one class
    for output, row in zip(ours, answer, strict=True):
        assert row["names"] == task.classes
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["classes"].dtype == row["mask"].dtype == np.uint8
        assert (row["mask"] == np.array(task.about.ids)[row["classes"]]).all()
        differing = row["classes"] != output["classes"].numpy()
        assert differing.mean() < 0.001  # logits that rounding makes equal


@pytest.mark.parametrize(
    ("about", "values", "dtype"),
    [
        ({"mask_kind": "grey", "ids": [0, 255]}, [[0, 255]], "uint8"),
        ({"mask_kind": "grey", "ids": [7, 1000]}, [[7, 1000]], "int32"),
        ({"mask_kind": "color", "ids": [0, 1], "colors": [[9, 9, 9], [1, 2, 3]]}, [[[9, 9, 9], [1, 2, 3]]], "uint8"),
    ],
)
def test_a_mask_has_the_values_of_the_users_files(about, values, dtype):
    mask = use_images._mask(np.array([[0, 1]]), {"classes": ["a", "b"]} | about)
    assert mask.tolist() == values
    assert mask.dtype == dtype


def test_a_detector_without_boxes_says_whether_the_threshold_is_the_reason():
    about = {"tile": None, "tile_overlap": 0.0, "nms": 0.5, "nms_of_model": None, "stretched": True, "size": 8}
    about |= {"batch": 1, "interpolation": "bilinear", "most_boxes": 9, "classes": ["a"]}

    def run(images, shapes):
        scores = torch.tensor([[0.25, 0.125]])
        boxes = torch.tensor([[[0.0, 0.0, 4.0, 4.0], [4.0, 4.0, 8.0, 8.0]]])
        return boxes, scores, torch.zeros(1, 2, dtype=torch.long)

    def boxes(threshold):
        pictures = [torch.zeros(3, 8, 8, dtype=torch.uint8)]
        return use_images.detected(about | {"score_threshold": threshold}, run, pictures)[0]

    assert boxes(0.3)["boxes"] == []
    assert "the highest score is 0.25: none reaches the threshold of 0.3" in boxes(0.3)["note"]
    assert [box["score"] for box in boxes(0.2)["boxes"]] == [0.25]
    assert "note" not in boxes(0.2)


def same_boxes(task, ours, answer):
    for place, row in enumerate(answer):
        real = ours["labels"][place] >= 0
        assert [task.classes.index(box["class"]) for box in row["boxes"]] == ours["labels"][place][real].tolist()
        scores = torch.tensor([box["score"] for box in row["boxes"]])
        torch.testing.assert_close(scores, ours["scores"][place][real], rtol=0, atol=ROUNDING)
        boxes = torch.tensor([box["box"] for box in row["boxes"]])
        torch.testing.assert_close(boxes, ours["boxes"][place][real], rtol=0, atol=1e-3)
        assert len(boxes) > 3


# ---- tasks of users


def test_a_users_task_is_exported_as_a_program_of_its_predict(tmp_path, capfd):
    settings = runs.config(train={"steps": 1})
    task = own_tasks.Deep(eval_length=6)
    trainer = export_cases.Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit(task)
    trainer.export(tmp_path / "out", own_tasks.Deep(eval_length=6))
    inputs, targets, _ = own_tasks.masked_data(5, seed=3)
    mask = torch.ones(5, 5, dtype=torch.float64)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        expected = task.predict(trainer.model, (inputs, targets, mask))
        for rows in (5, 1):
            found = program(batch=[inputs[:rows], targets[:rows], mask[:rows].bool()])
            torch.testing.assert_close(found, expected[:rows], rtol=0, atol=1e-12)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert [text.partition(" ")[0] for text in about["inputs"]["batch"]] == ["float64", "float64", "bool"]
    assert (tmp_path / "out" / "source").is_dir()
    assert capfd.readouterr().err == ""
    line = next_step(tmp_path / "out")
    exec(line, names := {})
    assert callable(names["program"])


def test_an_export_without_a_program_says_why(tmp_path, capfd):
    settings = runs.config(train={"steps": 1})
    for kind, reason in (("Branches", "data-dependent"), ("NoPredict", "NoPredict has no predict")):
        trainer = export_cases.Trainer(settings, run_dir=tmp_path / kind)
        trainer.fit(TASKS[kind]())
        capfd.readouterr()
        trainer.export(tmp_path / f"{kind}-out", TASKS[kind]())
        told = capfd.readouterr().err
        assert "warning: there is no model.pt2, so the weights need the code of the model: " in told
        assert reason in told
        files = sorted(path.name for path in (tmp_path / f"{kind}-out").iterdir())
        assert files == ["model.safetensors", "source"]


class Branches(own_tasks.Plain):
    """Its prediction depends on a branch that torch cannot trace."""

    def predict(self, model, batch):
        outputs = model(batch[0])
        return outputs if float(outputs.sum()) > 0 else -outputs


class NoPredict(own_tasks.Plain):
    predict = own_tasks.Task.predict


TASKS = {"Branches": Branches, "NoPredict": NoPredict}
