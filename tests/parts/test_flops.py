"""Floating-point operations of a training: how many are counted, and that the count leaves no trace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import lockstep
from lockstep import Trainer
from lockstep.core.errors import LockstepError
from lockstep.parts import peaks
from lockstep.parts.flops import FlopCount
from lockstep.parts.flops import FlopCounterMode as Counter
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_on_python_device, run_ranks
from tests.selection import mainly


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop, self.linear = nn.Dropout(0.2), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.drop(self.attention(x, x, x, need_weights=False)[0])) + x


class Sequences(lockstep.Task):
    """Attention, convolution and BatchNorm."""

    def model(self):
        torch.manual_seed(0)
        norm = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5))
        return nn.Sequential(norm, nn.Sequential(Block(), Block()), nn.Flatten(), nn.Linear(40, 3))

    def train_data(self):
        x = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum((1, 2)) > 0).long())

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def settings(**changes):
    return runs.config(train={"steps": 7}, log={"every_steps": 3, "flops": True}, **changes)


def by_torch(task, samples):
    """Operations of a forward and a backward pass, as torch counts them;
    with attention, which torch 2.13 leaves out.
    """
    model, batch = task.model(), task.train_data()[:samples]
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch).backward()
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry:
        return counter.get_total_flops()
    queries = 2 * 5 * 5 * 4  # multiplied and added, for each of 5 queries and 5 keys with 4 numbers
    attention = samples * 2 * 2 * queries  # of 2 blocks with 2 heads
    # Forward: two products. Backward: five, of which one computes the forward pass's probabilities again.
    return counter.get_total_flops() + attention * (2 + 5)


@pytest.mark.cases("True")
@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_those_that_torch_counts_also_if_activations_are_computed_again(tmp_path, recompute):
    counted = []
    changes = {"compute": {"activation_checkpointing": recompute}}
    state = counted_run(Sequences(), settings(**changes), tmp_path, counted)
    elements = 24 * (5 * 8 + 1)
    assert state.per_element * elements == by_torch(Sequences(), 24)
    assert counted == [2]  # after the third step only: the step is counted from 0
    line = "attention: torch's kernels flash_attention_for_cpu (2 calls) in a forward pass"
    assert (tmp_path / "train.log").read_text().count(line) == 1


def test_the_slow_attention_of_torch_is_named():
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    with sdpa_kernel([SDPBackend.MATH]), Counter() as counted:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert counted.attention == {"math_attention": 1}


def counted_run(task, config, folder, counted):
    """Train. Adds the steps after which a pass was counted. Returns the `FlopCount`."""
    seen = {}
    passes = FlopCount.count

    def count(self, *arguments):
        before = self.counted_for
        passes(self, *arguments)
        seen["count"] = self
        if self.counted_for != before:
            counted.append(self.steps)

    class Counting(FlopCount):
        steps = -1

        def add(self, micro_batches):
            self.steps += 1
            super().add(micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.parts.figures.FlopCount", Counting)
        patch.setattr(FlopCount, "count", count)
        Trainer(config, run_dir=folder, quiet=True).fit(task)
    return seen["count"]


def weights_with_and_without(changes):
    found = []
    for flops in (True, False):
        config = settings(**changes)
        config["log"] = config["log"] | {"flops": flops}
        found.append(runs.fit(Sequences(), config))
    return found


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "ddp")], [(1, "single"), (2, "ddp"), (2, "fsdp")]))
def test_the_training_is_the_same_bits_with_and_without_a_count(world, strategy):
    changes = {"parallel": {"strategy": strategy}, "batch": {"micro": 5}}
    for (with_count, logged), (without, plain) in run_ranks(world, weights_with_and_without, changes):
        assert all(torch.equal(with_count[name], without[name]) for name in without)
        assert logged["train/loss"] == plain["train/loss"]
        assert logged["train/tflops_per_s"] > 0
        assert "train/tflops_per_s" not in plain
        assert "train/mfu" not in logged  # the peak of a CPU is not known


def operations_per_element(changes):
    found = {}

    class Counting(FlopCount):
        def take(self):
            found["per element"] = self.per_element
            return super().take()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.parts.figures.FlopCount", Counting)
        runs.fit(Sequences(), settings(**changes))
    return found["per element"]


class Sizes(Sequences):
    """Notes the samples of each training pass."""

    def __init__(self):
        self.sizes = []

    def loss(self, model, batch):
        if model.training:
            self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


def sizes_of_passes(changes):
    task = Sizes()
    runs.fit(task, settings(**changes))
    return task.sizes


def test_a_sharded_model_is_counted_on_two_samples():
    """The pass of a count must not need more memory than a step. Of a compiled model, it is not compiled."""
    changes = {"batch": {"global": 24}, "parallel": {"strategy": "fsdp"}}
    for sizes in run_ranks(2, sizes_of_passes, changes):
        assert [number for number, size in enumerate(sizes) if size == 2] == [3], "after three steps"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_a_compiled_model_is_counted_on_two_samples_and_not_compiled_for_them(tmp_path):
    task, changes = Sizes(), {"compute": {"compile": "model", "compile_backend": "eager"}}
    found = counted_run(task, settings(**changes), tmp_path, [])
    assert [number for number, size in enumerate(task.sizes) if size == 2] == [3]
    assert found.per_element * 24 * (5 * 8 + 1) == by_torch(Sequences(), 24)


@pytest.mark.exhaustive
def test_every_strategy_counts_the_same_operations():
    single = run_ranks(1, operations_per_element, {})
    for strategy in ("ddp", "fsdp"):
        changes = {"parallel": {"strategy": strategy}}
        assert run_ranks(2, operations_per_element, changes) == pytest.approx(single * 2, rel=1e-9)


def test_a_model_is_counted_again_when_other_parameters_train(tmp_path):
    counted = []
    changes = {"train": {"steps": 9, "unfreeze": [{"match": ["0.*"], "step": 4}]}}
    counted_run(Sequences(), runs.config(log={"every_steps": 3, "flops": True}, **changes), tmp_path, counted)
    assert counted == [2, 5]


class Large(Sequences):
    """The count of its operations does not fit."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            if self.calls == 4:  # three steps, then the count
                raise self.error
        return super().loss(model, batch)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_memory_that_does_not_suffice_for_the_count_ends_nothing(error, tmp_path):
    results = Trainer(settings(), run_dir=tmp_path, quiet=True).fit(Large(error))
    assert results["step"] == 7
    assert "train/tflops_per_s" not in results


@rank_cases.impatient()
def error_of_the_count():
    try:
        with runs.shared_folder() as run_dir:
            runs.fit(Large(torch.OutOfMemoryError("no memory")), settings(parallel={"strategy": "fsdp"}), run_dir)
    except LockstepError as error:
        return str(error)
    return ""


def test_a_sharded_count_that_does_not_fit_says_so_and_the_next_start_takes_less():
    for text in run_ranks(2, error_of_the_count):
        assert "out of memory with micro-batches of 12: no memory" in text


def utilisation(device, folder):
    from tests.core.devices import test_python_device

    changes = {"train": {"steps": 4}, "log": {"every_steps": 2, "writers": ["json_lines"]}}
    device.get_device_name = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.python_device.PythonGpu.name", lambda self: "NVIDIA L4")
        test_python_device.train(device, folder, changes)


def test_share_of_the_peak_is_logged_where_the_gpu_is_known(tmp_path):
    import json

    run_on_python_device(utilisation, str(tmp_path / "run"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "train/tflops_per_s" in entry:
            assert entry["train/mfu"] == pytest.approx(entry["train/tflops_per_s"] / 60, rel=1e-2)  # TF32 of an L4
            return
    pytest.fail("no entry has it")


NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA RTX A6000": "RTX A6000",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA RTX 6000 Ada Generation": None,
    "NVIDIA GH200 480GB": None,
    "x86_64": None,
    "": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_found_by_the_name_that_torch_gives_it(name):
    found = peaks.find(name)
    assert (found and found.name) == NAMES[name]


def test_formats_that_a_gpu_lacks_are_computed_in_fp32():
    assert peaks.flops("Tesla T4", "fp16") == 65e12
    assert peaks.flops("Tesla T4", "bf16") == peaks.flops("Tesla T4", "tf32") == 8.1e12
    for gpu in peaks.GPUS:
        assert gpu.fp32 <= (gpu.tf32 or gpu.fp32) <= gpu.fp16
        assert gpu.bf16 in (gpu.fp16, None)


@pytest.mark.parametrize(("matmul", "peak"), [("highest", 19.5e12), ("high", 156e12), (None, 156e12)])
def test_peak_of_fp32_is_that_of_tf32_where_it_may_be_used(tmp_path, matmul, peak):
    found = []

    class Asking(own_tasks.Plain):
        def loss(self, model, batch):
            found.append(FlopCount(None, precision, None).peak("NVIDIA A100-SXM4-40GB"))
            return super().loss(model, batch)

    class precision:
        name = "fp32"

    Trainer(settings(compute={"matmul_precision": matmul}), run_dir=tmp_path, quiet=True).fit(Asking())
    assert set(found) == {peak}
