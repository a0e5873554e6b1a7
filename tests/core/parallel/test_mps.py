"""What is done for a Mac's GPU, as far as it shows without a Mac: the device, its random numbers, and float64."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from lockstep.configs import config_file
from lockstep.core import devices, metric_sync
from lockstep.core.data.device_copies import DeviceCopies
from lockstep.core.data.randomness import seed_forward
from lockstep.core.errors import UsageError
from lockstep.core.loss_sums import as_float64
from lockstep.core.parallel.precision import Precision, check_supported
from lockstep.core.parallel.single import Single
from lockstep.core.parallel.world import World, join_world, pick_device
from lockstep_lab.plan import measure
from lockstep_lab.verify import command

MPS = torch.device("mps", 0)


@pytest.fixture
def has_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_mps_is_the_device_of_a_single_rank(has_mps):
    assert pick_device("mps", 0, 1) == MPS
    assert config_file.load("toy", ["device=mps"]).device == "mps"
    for ranks in ({"local_size": 2}, {"local_size": 1, "size": 2}):
        with pytest.raises(UsageError, match="2 ranks, but mps is a device for one rank") as caught:
            pick_device("mps", 0, **ranks)
        assert "device=cpu" in caught.value.remedy


def test_auto_takes_mps_for_a_single_rank(has_mps, monkeypatch):
    assert pick_device("auto", 0, 1) == MPS
    assert pick_device("cpu", 0, 1).type == "cpu"
    for ranks in ({"local_size": 2}, {"local_size": 1, "size": 2}):
        assert pick_device("auto", 0, **ranks).type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto", 0, 1).type == "cuda"
    assert devices.rather_than_mps("auto") == "auto"


def test_verify_and_plan_stay_on_the_cpu_under_auto(has_mps):
    config = config_file.load("toy", ["device=auto"])
    told = []
    assert command._on_device_for(config.model_dump(by_alias=True), 2, told.append)["device"] == "cpu"
    assert "run on the CPU" in told[0]
    assert measure._short(config).device == "cpu"
    assert measure._short(config.model_copy(update={"device": "cuda"})).device == "cuda"


def test_a_log_says_what_differs_on_mps(monkeypatch):
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    note = devices.of(MPS).note()
    assert "one rank only" in note
    assert "run on the CPU" in note
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK")
    assert "end the training; PYTORCH_ENABLE_MPS_FALLBACK=1" in devices.of(MPS).note()
    assert devices.of(torch.device("cpu")).note() is None


def test_a_machine_without_mps_is_said_so(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    with pytest.raises(UsageError, match="this build of torch has no mps"), join_world("mps"):
        pass
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    with pytest.raises(UsageError, match="no Metal device"):
        pick_device("mps", 0, 1)


def test_precision_on_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 13)
    with pytest.raises(UsageError, match="bf16 from macOS 14"):
        check_supported("bf16", MPS)
    check_supported("fp16", MPS)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 14)
    check_supported("bf16", MPS)
    half = Precision("fp16", MPS)
    assert half.scaler.is_enabled()
    with half.autocast():
        assert torch.is_autocast_enabled("mps")
        assert torch.get_autocast_dtype("mps") == torch.float16


def test_forward_passes_seed_the_generator_of_mps(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    seed_forward(17, MPS)
    seed_forward(18, torch.device("cpu"))
    assert seeds == [17]


def test_model_in_float64_is_refused_and_its_tensors_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, dtype=torch.float64))
    with pytest.raises(UsageError, match=r": 1\.weight, 1\.bias, 1\.running_mean, 1\.running_var\n") as caught:
        Single(World(0, 1, 0, MPS)).build_model(lambda: model)
    assert caught.value.where == "device=mps"


def test_batches_go_to_mps_without_float64():
    moved = []

    class Spy(torch.Tensor):
        def to(self, *arguments, **options):
            moved.append((self.dtype, *arguments))
            return self

    def spy(*shape, dtype):
        return torch.zeros(*shape, dtype=dtype).as_subclass(Spy)

    batch = {"images": spy(2, dtype=torch.uint8), "targets": spy(2, dtype=torch.float64), "name": "x"}
    DeviceCopies(MPS, channels_last=False).begin(batch)
    assert moved == [(torch.uint8, MPS), (torch.float32, MPS)]


def test_logged_numbers_become_float64_on_the_cpu():
    class OnMps:
        device = MPS

        def __init__(self, value):
            self.value = value

        def float(self):
            return torch.tensor(self.value)

        def double(self):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    values = as_float64([OnMps(0.5), OnMps(1e30)])
    assert values.dtype == torch.float64
    assert values.tolist() == [0.5, float(torch.tensor(1e30))]
    assert as_float64([torch.tensor(0.1, dtype=torch.float64), torch.tensor(2.0)]).tolist() == [0.1, 2.0]


def test_metrics_stay_on_the_cpu_and_get_copies():
    class OnMps(torch.Tensor):
        def cpu(self):
            return self.as_subclass(torch.Tensor) + 0

    seen = []
    metrics = MetricCollection({"mean": MeanMetric().set_dtype(torch.float64)})
    update = metric_sync.place(metrics, lambda metrics, output, batch: seen.append((output, batch)), MPS)
    update(metrics, torch.ones(2).as_subclass(OnMps), {"labels": torch.zeros(2).as_subclass(OnMps)})
    ((output, batch),) = seen
    assert type(output) is type(batch["labels"]) is torch.Tensor
    assert metrics["mean"].mean_value.device.type == "cpu"
    given = object()
    assert metric_sync.place(metrics, given, torch.device("cpu")) is given


def test_verify_says_that_it_needs_another_device(tmp_path):
    config = config_file.load("toy", ["device=mps", "batch.micro=5"]).model_dump(by_alias=True)
    with pytest.raises(UsageError, match="mps supports neither"):
        command.verify(config, 2, tmp_path / "run")
    assert not (tmp_path / "run").exists()
