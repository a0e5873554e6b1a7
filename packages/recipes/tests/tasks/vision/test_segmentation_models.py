"""Models of transformers for segmentation: training, exported files, and the pipeline that reads them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from lockstep import LockstepError, Trainer
from lockstep_recipes.tasks.vision.image_task import logits_of
from lockstep_recipes.tasks.vision.segmentation.unet import UNet
from tests import runs
from tests.mask_cases import CLASSES, make_task, shapes_folder
from tests.selection import mainly

SEGFORMER = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2],
    "decoder_hidden_size": 16,
    "sr_ratios": [2, 2, 1, 1],
}
CONVNEXT = {
    "model_type": "convnext",
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 16, 16],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DPT = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 16,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 16,
    "image_size": 32,
}
ARCHITECTURES = {
    "segformer": {"sizes": SEGFORMER},
    "upernet": {"sizes": {"backbone_config": CONVNEXT, "hidden_size": 16, "use_auxiliary_head": True}},
    "dpt": {"sizes": DPT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shapes_folder(tmp_path_factory.mktemp("shapes"))


def trained(folder, run_dir, architecture, **options):
    settings = runs.config(
        task={
            "kind": "segmentation",
            "scratch": {"architecture": architecture} | ARCHITECTURES[architecture],
            "image_size": 32,
            **options,
        },
        data={"train": folder},
        batch={"global": 4},
        train={"steps": 3, "eval_every_steps": 3},
    )
    trainer = Trainer(settings, run_dir=run_dir, quiet=True)
    return trainer, trainer.fit()


@pytest.mark.parametrize("architecture", mainly(["segformer"], ["segformer", "upernet", "dpt"]))
def test_new_models_of_transformers_train_and_give_every_parameter_a_gradient(folder, tmp_path, architecture):
    options = {"segformer": {}, "upernet": {"eval_size": 64}, "dpt": {"eval_shape": "square"}}[architecture]
    trainer, results = trained(folder, tmp_path, architecture, **options)
    assert 0 <= results["eval/miou"] <= 1
    assert results["eval/samples"] == 7
    task = trainer.task()
    task.setup(tmp_path / "task", trained=True)
    model = task.model()
    item = task.collate([task.prepare(task.train_data()[1], 0, True) for _ in range(2)])
    task.loss(model, item)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"eval_shape": "square", "eval_size": 64}, marks=pytest.mark.exhaustive)]
)
def test_an_exported_model_gives_the_same_classes_in_the_pipeline_of_transformers(folder, tmp_path, options):
    from transformers import pipeline

    trainer, _ = trained(folder, tmp_path / "run", "segformer", **options)
    trainer.export(tmp_path / "out", program=False)
    segment = pipeline("image-segmentation", model=str(tmp_path / "out"), device="cpu")
    task = trainer.task()
    task.setup(tmp_path / "run" / "task", trained=True)
    data = task.eval_data()
    for index in range(3):
        batch = task.collate([task.prepare(data[index], 0, False)])
        with torch.no_grad():
            (output,) = task.predict(trainer.model, batch)
        expected = np.full(output["classes"].shape, 99)
        for part in segment(Image.fromarray(data[index].pixels)):
            expected[np.asarray(part["mask"]) > 0] = CLASSES.index(part["label"])
        same = float((expected == output["classes"].numpy()).mean())
        assert same > (0.99 if options else 0.9999)  # PIL's resized pixels differ by up to 2 levels


@pytest.mark.exhaustive
def test_a_pretrained_folder_is_fine_tuned_with_its_own_order_of_classes(folder, tmp_path):
    trainer, _ = trained(folder, tmp_path / "first", "segformer")
    trainer.export(tmp_path / "out", program=False)
    task = make_task({"model": str(tmp_path / "out"), "scratch": {}}, folder, double=False)
    model = task.model()
    assert task.new_weights == []
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 40)
        assert torch.equal(logits_of(model.eval(), images), logits_of(trainer.model, images))
    options = {"model": str(tmp_path / "out"), "scratch": {}, "classes": {"ground": 0, "disc": 1}, "ignore": [2, 255]}
    with pytest.raises(LockstepError, match="classifies into 3 labels"):
        make_task(options, folder, double=False).model()
    replaced = make_task(options | {"new_head": True}, folder, double=False)
    replaced.model()
    assert any("classifier" in name for name in replaced.new_weights)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("stride", mainly([2], [1, 2, 4]))
def test_the_unet_takes_pictures_of_any_size(norm, stride):
    torch.manual_seed(0)
    model = UNet(1, 5, width=8, depth=3, blocks=2, stride=stride, norm=norm).train()
    for height, width in ((32, 32), (37, 53), (64, 17)):
        logits = model(torch.randn(2, 1, height, width))
        assert logits.shape == (2, 5, -(-height // stride), -(-width // stride))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("width", mainly([8], [8, 16]))
def test_a_narrow_unet_trains_on_pictures_in_channels_last(width):
    """Convolutions of size 1 with a stride of 2 write outside of their memory there (torch 2.13, CPU)."""
    torch.manual_seed(0)
    model = UNet(3, 3, width=width, depth=3)
    assert not [
        m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) and m.stride != (1, 1)
    ]
    images = torch.randn(4, 64, 64, 3).permute(0, 3, 1, 2)
    masks = torch.randint(3, (4, 64, 64))
    for _ in range(3):
        functional.cross_entropy(model(images), masks).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
