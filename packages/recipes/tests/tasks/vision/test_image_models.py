"""Models of transformers and timm for images: sizes, normalisation layers, pretrained weights and exported files."""

import json
import shutil
import sys
import types

import pytest
import torch
from PIL import Image
from torch import nn

from lockstep import LockstepError, Trainer
from lockstep.core.batch_norm import without_unsupported
from lockstep.core.parallel.world import World
from lockstep_recipes.tasks.vision.batch_norm import exchange_batch_norm
from lockstep_recipes.tasks.vision.classification.models import TransformersClassifiers, models_for
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.image_task import logits_of
from lockstep_recipes.tasks.vision.size_check import check_image_sizes
from tests import runs
from tests.image_cases import RESNET, make_task, picture_folder
from tests.selection import mainly

NARROW = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SCRATCH = {
    "resnet": RESNET["sizes"],
    "vit": NARROW | {"patch_size": 8},
    "dinov2": {key: value for key, value in NARROW.items() if key != "intermediate_size"} | {"patch_size": 8},
    "convnext": {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2},
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4},
}


def batch_norm_names(model):
    """Names of the BatchNorm layers."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp("pictures") / "train", count=4)


def options_for(architecture, image_size=None):
    scratch = {"architecture": architecture, "sizes": SCRATCH[architecture]}
    several = 32 if architecture == "swin" else {0: 16, 1: 24, 2: 32}
    return {"scratch": scratch, "image_size": image_size or several}


@pytest.mark.exhaustive  # the tests of exports train such models
@pytest.mark.parametrize("architecture", mainly(["vit"], SCRATCH))
def test_new_models_of_transformers_take_every_size_and_train(folder, tmp_path, architecture):
    settings = runs.config(
        task={"kind": "classification", **options_for(architecture)},
        data={"train": folder, "eval": folder},
        batch={"global": 6},
        train={"steps": 6, "eval_every_steps": 6},  # 3 epochs
    )
    trainer = Trainer(settings, run_dir=tmp_path, quiet=True)
    results = trainer.fit()
    assert results["eval/samples"] == 12
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_position_embeddings_are_interpolated_as_transformers_does_it(folder):
    task = make_task(options_for("vit"), folder, double=False)
    model = task.model().eval()
    assert model.config.image_size == 32
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(pixel_values=images, interpolate_pos_encoding=True).logits
        assert torch.equal(logits_of(model, images), expected)
        with pytest.raises(ValueError, match="doesn't match model"):
            model(images)


class EvenSides(nn.Module):
    """Takes images whose side is a multiple of 12 only; reads a value, which the meta device does not have."""

    def __init__(self, reads):
        super().__init__()
        self.layer, self.reads = nn.Linear(3 * 144, 2), reads

    def forward(self, images):
        if self.reads and float(images.sum()) < 0:
            raise RuntimeError
        return self.layer(images.unfold(2, 12, 12).unfold(3, 12, 12).flatten(1))


@pytest.mark.parametrize("reads", [False, True])
def test_a_size_that_the_model_cannot_take_is_refused_with_the_nearest(reads):
    model = EvenSides(reads).train()

    def check(*sizes):
        check_image_sizes(model, sizes, channels=3, forward=lambda net, images: net(images), where="task.image_size")

    check(12, 13)  # `unfold` leaves out what is over
    with pytest.raises(LockstepError, match=r"30x30 pixels.*\n?.*nearest possible size is 23"):
        check(12, 30)
    assert model.training


def test_the_task_checks_all_sizes_before_training(folder):
    with pytest.raises(LockstepError, match=r"task\.image_size.*4x4 pixels[\s\S]*nearest possible size is 8"):
        make_task(options_for("convnext", image_size={0: 4, 1: 32}), folder).model()


def test_a_model_that_remembers_earlier_sizes_is_refused_with_several(folder):
    """Swin of transformers sets its shift to 0 for small images, and never back: a resumed run would differ."""
    with pytest.raises(
        LockstepError, match=r"depends on the sizes.*shift_size is 2 .* 64 pixels, but 0 if an image of 32"
    ):
        make_task(options_for("swin", image_size={0: 32, 1: 64}), folder).model()


@pytest.mark.parametrize(
    ("scratch", "message"),
    [
        ({"architecture": "resnett"}, "resnet"),
        ({"architecture": "resnet", "sizes": {"depth": [1]}}, "depths"),
        ({"sizes": {"depths": [1]}}, "takes: width"),
        ({"sizes": {"width": 10}}, "multiple of 4"),
    ],
)
def test_wrong_architectures_and_keys_are_errors_that_name_the_right_ones(folder, scratch, message):
    with pytest.raises(LockstepError, match=message):
        make_task({"scratch": scratch, "image_size": 32}, folder).model()


# ---- pretrained models


@pytest.fixture(scope="module")
def pretrained(folder, tmp_path_factory):
    """A ResNet for the three classes as `save_pretrained` writes it, with the config of an image processor."""
    path = tmp_path_factory.mktemp("models") / "resnet"
    task = make_task({"scratch": RESNET, "image_size": 20}, folder, double=False)
    torch.manual_seed(1)
    task.model().save_pretrained(path)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "size": {"shortest_edge": 28}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(path)


def test_a_pretrained_model_brings_weights_size_and_normalisation(folder, pretrained):
    from transformers import AutoModelForImageClassification

    task = make_task({"model": pretrained}, folder, double=False)
    assert (task.about.mean, task.about.std, task.about.size) == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], 28)
    ours, theirs = task.model().state_dict(), AutoModelForImageClassification.from_pretrained(pretrained).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert make_task({"model": pretrained, "mean": [0.0] * 3}, folder).about.mean == [0.0] * 3


def test_a_model_with_another_number_of_classes_needs_a_new_head(pretrained, tmp_path):
    root = picture_folder(tmp_path / "train", count=1)
    (tmp_path / "train" / "red").rename(tmp_path / "train" / "orange")
    extra = tmp_path / "train" / "yellow"
    extra.mkdir()
    (extra / "0.png").write_bytes((tmp_path / "train" / "blue" / "000.png").read_bytes())
    with pytest.raises(LockstepError, match=r"task\.new_head=true"):
        make_task({"model": pretrained}, root).model()
    task = make_task({"model": pretrained, "new_head": True}, root, double=False)
    task.model()
    assert any("classifier" in name for name in task.new_weights)


@pytest.mark.parametrize("resize", mainly([24], [None, 24]))
def test_an_exported_model_predicts_the_same_in_a_pipeline_of_transformers(folder, tmp_path, resize):
    from transformers import pipeline

    task = {"kind": "classification", "scratch": RESNET, "image_size": 20, "eval_resize": resize, "top_k": 3}
    settings = runs.config(task=task, data={"train": folder}, batch={"global": 6}, train={"steps": 3})
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    trainer.export(tmp_path / "out", program=False)
    picture = f"{folder}/red/001.png"
    (row,) = trainer.describe([picture])
    classify = pipeline("image-classification", model=str(tmp_path / "out"), device="cpu")
    theirs = {answer["label"]: answer["score"] for answer in classify(picture)}
    assert theirs.keys() == row["top"].keys()
    assert all(theirs[name] == pytest.approx(row["top"][name], abs=3e-3) for name in theirs)


def test_transformers_does_not_load_exported_groups_as_batch_norm(folder, tmp_path, capfd):
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

    task = {"kind": "classification", "scratch": RESNET, "image_size": 20, "batch_norm": "group", "top_k": 3}
    settings = runs.config(task=task, data={"train": folder}, batch={"global": 6}, train={"steps": 3})
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    out = tmp_path / "out"
    Trainer(settings, run_dir=tmp_path / "run").export(out, program=False)
    told = capfd.readouterr().err
    assert "warning: transformers cannot load this model" in told
    assert "task.batch_norm=batch" in told
    with pytest.raises((OSError, ValueError)):
        AutoModelForImageClassification.from_pretrained(out)
    config = AutoConfig.from_pretrained(out / "config_of_other_layers.json")  # as the documentation says
    model = exchange_batch_norm(AutoModelForImageClassification.from_config(config), "group").eval()
    model.load_state_dict(load_file(out / "model.safetensors"))
    picture = f"{folder}/red/001.png"
    pixels = AutoImageProcessor.from_pretrained(out)(Image.open(picture), return_tensors="pt")["pixel_values"]
    (row,) = Trainer(settings, run_dir=tmp_path / "run", quiet=True).describe([picture])
    values = model(pixels).logits[0].softmax(0).tolist()
    theirs = dict(zip(config.id2label.values(), values, strict=True))
    assert all(theirs[name] == pytest.approx(row["top"][name], abs=3e-3) for name in theirs)


@pytest.mark.parametrize("scratch", mainly([{"architecture": "convnet"}], [RESNET, {"architecture": "convnet"}]))
def test_an_export_says_how_evaluations_prepare_pictures(folder, tmp_path, scratch):
    augment = {"interpolation": "bicubic"}
    task = {"kind": "classification", "scratch": scratch, "image_size": {0: 16, 1: 20}, "augment": augment}
    options = {"eval_size": 24, "eval_resize": 28, "channels": 1, "batch_norm": "frozen"}
    settings = runs.config(task=task | options, data={"train": folder}, batch={"global": 6}, train={"steps": 3})
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    trainer.export(tmp_path / "out", program=False)
    about = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert about == {
        "classes": ["blue", "green", "red"],
        "counts": [4, 4, 4],
        "mean": [0.5],
        "std": [0.5],
        "size": 24,
        "levels": 65535,
        "eval_resize": 28,
        "interpolation": "bicubic",
        "channels": 1,
        "cache_size": None,
        "batch_norm": "frozen",
    }


@pytest.mark.exhaustive  # as the next, with one channel
def test_an_exported_model_of_grey_pictures_predicts_the_same_in_transformers(folder, tmp_path, capfd):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    task = {"kind": "classification", "scratch": RESNET, "image_size": 20, "channels": 1, "top_k": 3}
    settings = runs.config(task=task, data={"train": folder}, batch={"global": 6}, train={"steps": 3})
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    out = tmp_path / "out"
    Trainer(settings, run_dir=tmp_path / "run").export(out, program=False)
    assert "warning: transformers.pipeline converts every image to RGB" in capfd.readouterr().err
    picture = f"{folder}/red/001.png"
    model = AutoModelForImageClassification.from_pretrained(out).eval()
    inputs = AutoImageProcessor.from_pretrained(out)(Image.open(picture).convert("L"), return_tensors="pt")
    values = model(**inputs).logits[0].softmax(0).tolist()
    (row,) = Trainer(settings, run_dir=tmp_path / "run", quiet=True).describe([picture])
    theirs = dict(zip(model.config.id2label.values(), values, strict=True))
    assert all(theirs[name] == pytest.approx(row["top"][name], abs=3e-3) for name in theirs)


def test_a_finished_run_does_not_need_the_pretrained_model_any_more(folder, pretrained, tmp_path):
    moved = tmp_path / "model"
    shutil.copytree(pretrained, moved)
    settings = runs.config(
        task={"kind": "classification", "model": str(moved)},
        data={"train": folder},
        batch={"global": 6},
        train={"steps": 1},
    )
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    shutil.rmtree(moved)
    assert len(trainer.describe([folder])) == 12


# ---- normalisation layers


def resnet():
    options = ClassificationOptions.model_validate({"scratch": RESNET})
    torch.manual_seed(0)
    return TransformersClassifiers(options, None).make(["a", "b"], size=32, trained=False)[0]


def test_frozen_batch_norm_keeps_its_statistics_and_ignores_the_batch():
    model = exchange_batch_norm(resnet(), "frozen").train()
    names, before = list(model.state_dict()), {name: value.clone() for name, value in model.named_buffers()}
    images = torch.randn(4, 3, 32, 32)
    together = logits_of(model, images)
    together.sum().backward()
    apart = torch.cat([logits_of(model, image.unsqueeze(0)) for image in images])
    assert torch.allclose(together, apart, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert names == list(resnet().state_dict())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_group_norm_takes_the_place_and_the_parameters_of_batch_norm():
    plain, model = resnet(), exchange_batch_norm(resnet(), "group")
    assert batch_norm_names(plain)
    assert not batch_norm_names(model)
    for name in batch_norm_names(plain):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.GroupNorm)
        assert layer.num_channels % layer.num_groups == 0
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    images = torch.randn(4, 3, 32, 32)
    apart = torch.cat([logits_of(model, image.unsqueeze(0)) for image in images])
    assert torch.allclose(logits_of(model, images), apart, atol=1e-5)


def test_device_of_the_run_decides_whether_batch_norm_is_synchronised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # whatever other devices the machine has
    images = torch.randn(4, 3, 32, 32)
    plain, model = resnet(), exchange_batch_norm(resnet(), "sync")
    assert kinds_of_norms(model) == {nn.SyncBatchNorm}
    model.load_state_dict(plain.state_dict())
    placed, _ = without_unsupported(model, World(0, 2, 0, torch.device("cpu")))
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in placed.modules())
    assert torch.equal(logits_of(plain.train(), images), logits_of(placed.train(), images))
    on_gpu, notes = without_unsupported(exchange_batch_norm(resnet(), "sync"), World(0, 2, 0, torch.device("cuda", 0)))
    assert kinds_of_norms(on_gpu) == {nn.SyncBatchNorm}
    assert not notes


def kinds_of_norms(model):
    return {type(model.get_submodule(name)) for name in batch_norm_names(model)}


def test_layers_that_do_more_than_batch_norm_are_not_replaced_by_group_norm():
    class WithActivation(nn.BatchNorm2d):
        pass

    with pytest.raises(LockstepError, match="WithActivation"):
        exchange_batch_norm(nn.Sequential(WithActivation(4)), "group")


# ---- timm, of which a part stands in: it does not import without torchvision


class TimmNet(nn.Module):
    def __init__(self, classes, channels, size, known):
        super().__init__()
        self.layer, self.size = nn.Conv2d(channels, classes, 4, 4), size
        self.pretrained_cfg = {"num_classes": known, "classifier": "head.fc"}

    def forward(self, images):
        return self.layer(images).mean((2, 3))


@pytest.fixture
def timm(monkeypatch):
    calls = []

    def create_model(name, pretrained=False, num_classes=1000, in_chans=3, **extra):
        calls.append((name, pretrained, extra))
        if name == "convolutional" and extra:
            raise TypeError("unexpected keyword")
        return TimmNet(num_classes, in_chans, extra.get("img_size"), 1000)

    config = types.SimpleNamespace(input_size=(3, 48, 48), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    module = types.ModuleType("timm")
    module.create_model, module.calls = create_model, calls
    module.is_model = lambda name: name in ("vision", "convolutional")
    module.list_models = lambda pattern: ["vision", "convolutional"]
    module.get_pretrained_cfg = lambda name: config
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.mark.parametrize("name", ["vision", "convolutional"])
def test_pretrained_models_of_timm_by_name(folder, timm, name):
    task = make_task({"model": f"timm:{name}"}, folder, double=False)
    assert (task.about.size, task.about.mean, task.about.std) == (48, [0.5] * 3, [0.2] * 3)
    model = task.model()
    assert timm.calls[-1][:2] == (name, True)
    assert model.size == (48 if name == "vision" else None)
    assert task.new_weights == ["head.fc"]


def test_new_models_of_timm(folder, timm):
    scratch = {"architecture": "timm:vision", "sizes": {"drop_path_rate": 0.1}}
    make_task({"scratch": scratch, "image_size": 32}, folder).model()
    assert timm.calls[-1] == ("vision", False, {"img_size": 32, "dynamic_img_size": True, "drop_path_rate": 0.1})
    with pytest.raises(LockstepError, match=r"no model 'visio'[\s\S]*vision"):
        make_task({"scratch": {"architecture": "timm:visio"}, "image_size": 32}, folder).model()


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    options = ClassificationOptions.model_validate({"model": "timm:resnet50"})
    with pytest.raises(LockstepError, match=r"pip install timm"):
        models_for(options, None).pixels()
