"""A preset says how a training is run, and never what is trained."""

import re
import shutil
import sys

import pytest
import torch
import yaml
from typer.testing import CliRunner

from lockstep.cli import application as cli
from lockstep.cli import config_preset
from lockstep.cli import ranks as command_ranks
from lockstep.configs import config_file
from lockstep.core.config.sections import RunConfig, all_keys, training_keys
from lockstep.core.errors import UsageError
from lockstep.core.parallel.precision import check_supported
from tests.selection import mainly

RECIPES = ["digits", "toy", "image_folder", "text", "ag_news", "docstrings"]
SHIPPED = ["a100x8", "g5", "gpu", "h100x8", "local", "p3"]


def preset(folder, **values):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return config_preset.read(str(path))


def test_the_shipped_presets_are_listed_with_what_they_are_for():
    known = config_preset.presets()
    assert sorted(known) == SHIPPED
    assert "V100" in known["p3"]
    listed = CliRunner().invoke(cli.app, ["doctor", "presets"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("recipe", mainly(["digits"], RECIPES))
def test_a_shipped_preset_changes_nothing_that_determines_the_training_but_precision(name, recipe):
    before = config_file.load(recipe)
    after = config_preset.read(name).apply(before)
    changed = {key for key, value in training_keys(after).items() if training_keys(before)[key] != value}
    assert changed <= ({"precision", "parallel.param_dtype"} if recipe == "lm" else {"precision"})
    assert after.train == before.train
    assert after.schedule == before.schedule
    assert after.name == before.name


def test_the_keys_that_a_preset_may_set_are_free_when_a_run_goes_on():
    fixed = set(training_keys(RunConfig()))
    assert fixed <= {key for key, determines in all_keys() if determines} | {"task"}
    assert set(config_preset.allowed_keys()) & fixed == {"precision", "parallel.param_dtype"}
    assert {"batch.micro", "data.workers", "device", "parallel.strategy", "compute.channels_last"} <= set(
        config_preset.allowed_keys()
    )


@pytest.mark.parametrize("key", sorted(key for key, _ in all_keys()))
def test_every_other_key_is_refused_by_name(tmp_path, key):
    section, _, inner = key.rpartition(".")
    values = {section: {inner: 1}} if section else {key: 1}
    if key in config_preset.allowed_keys():
        assert preset(tmp_path, **values).keys == {key: 1}
        return
    with pytest.raises(UsageError) as caught:
        preset(tmp_path, **values)
    assert f"{key}: " in caught.value.what
    assert "only says how a training is run" in caught.value.what
    assert str(tmp_path / "mine.yaml") == caught.value.where
    assert caught.value.exit_code == 2


def test_all_faults_of_a_preset_are_told_at_once(tmp_path):
    with pytest.raises(UsageError) as caught:
        preset(tmp_path, nproc=0, optim={"lr": 1.0}, task={"image_size": 32}, data={"wokers": 3}, seeed=1, parallel=3)
    what = caught.value.what
    assert "nproc: 0 is not a number of ranks" in what
    assert "optim.lr: determines the training" in what
    assert "task" in what
    assert "data.wokers: unknown key; did you mean data.workers?" in what
    assert "seeed: unknown key" in what
    assert "parallel: unknown key" in what


def test_a_wrong_value_is_named_with_the_file_and_the_key(tmp_path):
    wrong = preset(tmp_path, data={"workers": "many"})
    with pytest.raises(UsageError, match=r"mine\.yaml: data\.workers: 'many'"):
        wrong.apply(config_file.load("toy"))


@pytest.mark.parametrize(
    ("text", "expected"), [("[1, 2]", "not a YAML mapping"), ("a: [", "not YAML"), (None, "no such")]
)
def test_a_file_that_is_no_preset_is_named(tmp_path, text, expected):
    path = tmp_path / "mine.yml"
    if text:
        path.write_text(text)
    with pytest.raises(UsageError, match=expected) as caught:
        config_preset.read(str(path))
    assert caught.value.where == str(path)


def test_an_unknown_name_is_told_with_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean a100x8\? There are: a100x8, g5"):
        config_preset.read("a100")


def test_the_command_line_takes_precedence_over_the_preset_and_the_preset_over_the_recipe(tmp_path):
    mine = preset(tmp_path, precision="bf16", data={"workers": 5}, batch={"micro": 16}, compute={"channels_last": True})
    overrides = ["data.workers=1", "compute={halve_on_oom: false}"]
    config = mine.apply(config_file.load("digits", overrides), overrides)
    assert config.data.workers == 1
    assert not config.compute.channels_last
    assert (config.precision, config.batch.micro) == ("bf16", 16)
    assert config.data.train == "digits"


@pytest.mark.parametrize(
    ("overrides", "micro"),
    [
        ([], 64),
        (["batch.global=24"], 24),
        (["batch.global=2000"], 512),
        (["batch.per_rank=4"], None),
        (["batch.micro=3"], 3),
    ],
)
def test_the_micro_batch_is_the_largest_for_the_machine(overrides, micro):
    config = config_preset.read("h100x8").apply(config_file.load("digits", overrides), overrides)
    assert config.batch.micro == micro


def test_a_preset_applies_to_a_run_that_was_recorded(tmp_path):
    recorded = config_file.load("text", ["data.train=x.csv"])
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(recorded))
    config = config_preset.read("local").apply(config_file.read_run(tmp_path))
    assert config == recorded.model_copy(update={"data": config.data, "batch": config.batch})
    assert (config.data.workers, config.batch.micro) == (2, 32)


def test_a_preset_has_keys_for_a_kind_of_task(tmp_path):
    def gathered_in(recipe, *overrides):
        before = config_file.load(recipe, overrides)
        after = config_preset.read("h100x8").apply(before, overrides)
        return after.parallel.param_dtype, config_preset.read("h100x8").notes(before, after)

    dtype, notes = gathered_in("lm", "parallel.strategy=fsdp", "precision=bf16")
    assert dtype == "bf16"
    assert "parallel.param_dtype=bf16 instead of null" in notes[0]
    assert gathered_in("lm", "parallel.param_dtype=fp32")[0] == "fp32"
    assert gathered_in("ag_news")[0] is None
    (tmp_path / "mine.yaml").write_text("nproc: 2\ntasks: {lm: {optim: {lr: 1}}}\n")
    with pytest.raises(UsageError, match=r"mine.yaml, tasks.lm: the preset has errors:\s+optim.lr: determines"):
        config_preset.read(str(tmp_path / "mine.yaml"))


def test_what_people_should_know_is_said():
    recipe = config_file.load("ag_news", ["batch.per_rank=32"])
    p3 = config_preset.read("p3")
    first, second = p3.notes(recipe, p3.apply(recipe))
    assert "precision=fp16 instead of bf16" in first
    assert "batch.per_rank" in second
    local, in_fp32 = config_preset.read("local"), recipe.model_copy(update={"precision": "fp32"})
    assert local.notes(in_fp32, local.apply(in_fp32)) == []


@pytest.mark.parametrize(
    ("name", "gpus", "nproc", "overrides", "expected"),
    [
        ("g5", 0, None, [], "it needs 4 GPUs, and this machine has none"),
        ("g5", 0, "1", [], "it needs a GPU, and this machine has none"),
        ("g5", 0, "auto", [], "it needs a GPU for each rank, and this machine has none"),
        ("h100x8", 4, None, [], "use --preset g5, or --nproc 4"),
        ("h100x8", 2, None, [], "use --preset gpu, or --nproc 2"),
        ("h100x8", 0, None, [], "use --preset local, or device=cpu"),
        ("h100x8", 8, None, [], None),
        ("h100x8", 4, "4", [], None),
        ("h100x8", 4, "auto", [], None),
        ("h100x8", 0, "2", ["device=cpu"], None),
        ("local", 0, None, [], None),
    ],
)
def test_a_machine_with_too_few_gpus_is_told_which_preset_fits(monkeypatch, name, gpus, nproc, overrides, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("RANK", raising=False)
    settings = config_file.load("digits", overrides)
    if expected is None:
        _, ranks = command_ranks.on_machine(settings, name, nproc, overrides)
        assert ranks == nproc or (nproc is None and ranks == config_preset.read(name).nproc)
        return
    with pytest.raises(UsageError) as caught:
        command_ranks.on_machine(settings, name, nproc, overrides)
    assert expected in str(caught.value)
    assert caught.value.where == f"--preset {name}"


def test_bf16_on_a_gpu_without_it_is_an_error_on_the_rank(monkeypatch):
    place = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
    with pytest.raises(UsageError, match=r"Tesla V100.* has no bf16: its compute capability is 7\.0") as caught:
        check_supported("bf16", place)
    assert "--preset p3" in caught.value.remedy
    check_supported("fp16", place)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    check_supported("bf16", place)
    check_supported("bf16", torch.device("cpu"))


def test_training_evaluating_and_going_on_with_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("data: {workers: 0}\nbatch: {micro: 8}\nprecision: bf16\n")

    def call(*arguments):
        return CliRunner().invoke(cli.app, list(arguments))

    quick = ["train.steps=3", "train.eval_every_steps=3", "log.writers=[json_lines]"]
    trained = call("train", "toy", *quick, "--preset", "mine.yaml")
    assert trained.exit_code == 0, trained.stderr
    assert "preset mine.yaml: precision=bf16 instead of fp32" in trained.stderr
    assert config_file.read_run(tmp_path / "runs/toy").batch.micro == 8
    evaluated = call("evaluate", "runs/toy", "--preset", "mine.yaml")
    assert evaluated.exit_code == 0, evaluated.stderr
    assert "precision" not in evaluated.stderr  # it is that of the run
    refused = call("train", "toy", *quick, "--preset", "local")
    assert refused.exit_code == 2
    assert "precision: 'bf16' there, 'fp32' here" in refused.stderr
    shutil.rmtree(tmp_path / "runs")


def test_presets_are_read_without_torch():
    import subprocess

    code = "import sys; from lockstep.cli import config_preset; config_preset.read('g5'); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PICTURE = 3 * 224 * 224
"""Bytes of a picture, as workers pass it on: the task makes numbers of it on the device."""


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "local"])
def test_a_preset_starts_no_more_processes_that_work_at_once_than_the_machine_has_cpus(name):
    """Ranks, and the workers of the training or those of an evaluation: the others wait meanwhile."""
    preset, about = config_preset.read(name), config_preset.presets()[name]
    threads = int(re.search(r"(\d+) CPU threads", about)[1])
    assert int(preset.nproc) * (1 + preset.keys["data.workers"]) <= threads


@pytest.mark.parametrize(("name", "most_gb"), [("a100x8", 4), ("h100x8", 10)])
def test_what_workers_prepare_ahead_of_a_training_fits_into_shared_memory(name, most_gb):
    """The sizes that docs/launching.md names."""
    preset = config_preset.read(name)
    keys = preset.keys
    waiting = int(preset.nproc) * keys["data.workers"] * keys["data.prefetch"] * keys["batch.micro"] * PICTURE
    assert waiting <= most_gb * 1e9


def test_a_preset_binds_ranks_to_cpus_only_where_numactl_is_installed(monkeypatch):
    preset, config = config_preset.read("h100x8"), config_file.load("image_folder")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    bound = preset.apply(config)
    assert bound.compute.numa_binding == "node"
    assert not any("numactl" in line for line in preset.notes(config, bound))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    free = preset.apply(config)
    assert free.compute.numa_binding is None
    assert sum("numactl is missing" in line for line in preset.notes(config, free)) == 1
    given = config_file.load("image_folder", ["compute.numa_binding=node"])
    assert preset.apply(given, ["compute.numa_binding=node"]).compute.numa_binding == "node"  # it is strict


def test_presets_have_smaller_micro_batches_for_large_samples():
    for name in config_preset.presets():
        preset = config_preset.read(name)
        for kind in ("lm", "segmentation", "detection", "volume_risk") if name != "local" else ():
            assert preset.tasks[kind]["batch.micro"] < preset.keys["batch.micro"]
