"""`lockstep plan`: recipes, a user's task, made-up samples, JSON, errors."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lockstep.cli import application as cli
from lockstep.configs import config_file
from lockstep_lab.plan import command, show
from lockstep_lab.plan.inputs import Machines
from tests.selection import mainly

RUN = CliRunner()
TASK = """
import torch
from lockstep import Task
class Mine(Task):
    def __init__(self, width: int = 8):
        self.width = width
    def model(self):
        return torch.nn.Sequential(*[torch.nn.Linear(self.width, self.width) for _ in range(3)])
    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(20, self.width))
    def loss(self, model, batch):
        return model(batch[0]).square().sum()
"""


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_traced_once():
    trace, traced = command.facts_with_or_without_data, {}

    def facts(config, **options):
        key = config.model_dump_json(), repr(options)
        if key not in traced:
            traced[key] = trace(config, **options)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "facts_with_or_without_data", facts)
        yield


def plan(*arguments):
    return RUN.invoke(cli.app, ["plan", *arguments])


def test_a_recipe_with_data_in_the_package():
    result = plan("digits", "--gpus", "2", "--gpu", "T4", "precision=fp32")
    assert result.exit_code == 0, result.output
    assert "* ddp, fp32" in result.stdout
    assert "batch: 64 samples = micro-batches of 32 x 1 on 2 GPUs" in result.stdout
    assert "a step this short may be limited by the host" in result.stdout
    assert "keys: parallel.strategy=ddp" in result.stdout


def test_a_users_task_as_json(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    arguments = ["--gpus", "16", "--gpu-memory", "1GB", "--json", "-", "plan.failures_per_gpu_year=1"]
    result = plan(f"{tmp_path / 'mine.py'}:Mine", "task.width=16", *arguments, "plan.save_seconds=10")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"]["parameters"] == 3 * (16 * 16 + 16)
    assert found["model"]["blocks"] == ["0", "1", "2"]
    assert found["world"]["nodes"] == 2
    assert found["recommended"] == "ddp, bf16"
    assert found["save_every_seconds"] == pytest.approx((2 * 10 * 365.25 * 86400 / 16) ** 0.5, rel=0.01)
    first = found["options"][0]
    assert first["estimate"]["memory"]["peak_bytes"] == sum(first["estimate"]["memory"]["at_peak"].values())


@pytest.mark.parametrize("recipe", mainly(["text"], ["image_folder", "segmentation", "detection", "text", "ct_small"]))
def test_recipes_without_data_are_planned_with_made_up_samples(recipe):
    config = config_file.load(recipe, ["task.image_size=112"] if recipe == "ct_small" else [])
    facts = command.facts_with_or_without_data(config, precisions=("fp32",), recompute=(False,))
    assert facts.passes, facts.notes
    assert facts.samples is None
    assert facts.notes[0] == command.assumption(config.task)


@pytest.mark.exhaustive  # as the test above; the options are tested below
def test_what_is_known_of_data_that_are_not_here_can_be_said():
    known = command.MadeUp(classes=30, samples=1000)
    of_ten, of_thirty = (
        command.facts_with_or_without_data(
            config_file.load("image_folder", []), precisions=("fp32",), recompute=(False,), made_up=made_up
        )
        for made_up in (command.NOTHING_KNOWN, known)
    )
    assert of_thirty.samples == 1000
    assert "30 classes" in of_thirty.notes[0]
    last = of_ten.parameters[-1].elements, of_thirty.parameters[-1].elements
    assert last == (10, 30)


@pytest.mark.parametrize(
    "arguments",
    [["digits", "plan.samples=9"], ["digits", "plan.classes=9"], ["imagenet", "data.train=here", "plan.samples=9"]],
)
def test_what_the_data_tell_is_not_said_again(arguments):
    result = plan(*arguments, "--gpus", "2", "--gpu-memory", "1GB")
    assert result.exit_code == 2
    assert f"{arguments[-1].partition('=')[0]}: is only for data that are not on this machine" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["ct_small"], "this task has no classes"),
        (["segmentation", "task.classes=[sky, road]"], "task.classes already sets the classes"),
    ],
)
def test_classes_that_would_change_nothing_are_refused(arguments, why):
    result = plan(*arguments, "plan.classes=9", "--gpus", "2", "--gpu-memory", "1GB")
    assert result.exit_code == 2
    assert f"plan.classes=9: {why}" in result.stderr


@pytest.mark.exhaustive
def test_pictures_have_their_largest_size():
    sizes = ["task.image_size={0: 32, 5: 64}", "train.epochs=10"]
    small, large = (
        command.facts_with_or_without_data(
            config_file.load("image_folder", overrides), precisions=("fp32",), recompute=(False,)
        )
        for overrides in (["task.image_size=32"], sizes)
    )
    bytes_of = [facts.passes["fp32", False, None].batch.sample_bytes for facts in (small, large)]
    assert bytes_of[1] == pytest.approx(4 * bytes_of[0], rel=0.01)


def test_the_text_of_a_plan_that_does_not_fit_says_what_to_change(tmp_path):
    result = plan("digits", "--gpus", "2", "--gpu-memory", "100KB", "precision=fp32")
    assert result.exit_code == 0, result.output
    assert "Recommended: nothing" in result.stdout
    assert "ddp, fp32: needs" in result.stdout


def test_a_plan_is_written_into_a_file(tmp_path):
    path = tmp_path / "plan.json"
    assert f"written: {path}" in plan("toy", "--gpu-memory", "1GB", "--json", str(path)).stdout
    assert json.loads(path.read_text())["model"]["name"] == "toy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits"], "memory of a GPU is not given"),
        (["digits", "--gpu", "H10"], "the nearest is"),
        (["digits", "--gpu-memory", "much"], "is not a size"),
        (["digits", "--gpu", "H100", "plan.save_seconds=3"], "go together"),
        (["digits", "--gpu", "H100", "data.train=none.csv"], "none.csv"),
        (["cifar_", "--gpu", "H100"], "cifar"),
    ],
)
def test_bad_input_is_an_error_with_a_remedy(arguments, words):
    result = plan(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert words in result.output
    assert "remedy" in result.output


def test_a_plan_without_times_has_no_columns_for_them():
    config = config_file.load("toy", [])
    text = show.text(command.plan_of(config, Machines(1, 1, memory_bytes=10**9), precisions=("fp32",)))
    assert "step, s" not in text
    assert "nothing is simpler" in text


def test_keys_switch_off_what_the_recommended_option_does_without():
    config = config_file.load("digits", ["compute.activation_checkpointing=true", "parallel.cpu_offload=true"])
    plan = command.plan_of(config, Machines(2, 2, memory_bytes=10**9), precisions=("fp32",))
    assert plan.recommended.name == "ddp, fp32"
    assert plan.keys[-2:] == ["parallel.cpu_offload=false", "compute.activation_checkpointing=false"]


def test_no_figure_of_the_table_is_cut():
    config = config_file.load("digits", [])
    times = {"peak_flops": {"fp32": 7e13, "bf16": 1e15}, "link_bytes_per_second": 4.5e11}
    text = show.text(command.plan_of(config, Machines(8, 8, memory_bytes=80 * 10**9, **times)), width=80)
    assert "step, s" in text
    assert "…" not in text


def test_the_recommended_keys_can_be_given_to_a_config_with_a_batch_per_rank(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    target, overrides = f"{tmp_path / 'mine.py'}:Mine", ["batch.per_rank=4", "batch.accumulate=2"]
    found = command.plan_of(
        config_file.load(target, overrides), Machines(2, 2, memory_bytes=10**9), precisions=["fp32"]
    )
    batch = config_file.load(target, [*overrides, *found.keys]).batch
    assert (batch.global_, batch.micro) == (16, 8)


def test_gpus_without_samples_are_named(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    config = config_file.load(f"{tmp_path / 'mine.py'}:Mine", ["batch.global=3"])
    found = command.plan_of(config, Machines(4, 4, memory_bytes=10**9), precisions=["fp32"])
    assert found.facts.notes[0].startswith("batch.global=3 is less than the 4 GPUs: 1 of them never get a sample")
    large = replace(found.facts, global_batch=21)  # of 20 samples
    assert "batch.global=21 exceeds the 20 samples of an epoch" in command._notes_on_the_batch(large, found.world)[0]
    assert "batch: 3 samples = micro-batches of up to 1 x 1 on 4 GPUs" in show.text(found)
