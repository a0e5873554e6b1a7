"""The head of a log names a GPU that torch does not see, and a GPU that computes in fp32."""

import pytest
import torch

from lockstep.core.config.sections import RunConfig
from lockstep.trainer import device_notes


def config(**keys):
    return RunConfig(name="made", batch={"global": 4}, **keys)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [
        (None, None, "is built without CUDA"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES='' hides GPUs"),
        ("12.8", None, "the driver may be too old for CUDA 12.8"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_named_with_the_likely_reason(monkeypatch, cuda, visible, reason):
    monkeypatch.setattr(device_notes.glob, "glob", lambda pattern: ["/dev/nvidia1", "/dev/nvidia0"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (line,) = device_notes.lines(config(device="auto"), CPU)
    assert line.startswith("WARNING: this machine has /dev/nvidia0, but torch sees no GPU")
    assert reason in line
    assert device_notes.lines(config(device="cpu"), CPU) == []


def test_no_line_without_a_gpu_or_in_bf16():
    assert device_notes.lines(config(device="auto"), CPU) == []
    assert device_notes.lines(config(device="cuda", precision="bf16"), CUDA) == []


def test_fp32_on_a_gpu_is_named_with_the_precision_of_products():
    (line,) = device_notes.lines(config(device="cuda", precision="fp32"), CUDA)
    assert line.startswith("precision: fp32, matrix products in fp32")
    assert "--preset gpu" in line
