"""The search for the largest micro-batch, with attempts that need no process; and a whole search."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep.core.errors import TrainingError, UsageError
from lockstep_lab.search import batch_size
from lockstep_lab.search.batch_size import BatchSizeResult


def up_to(limit, per_s=lambda size: float(size)):
    return lambda size: BatchSizeResult(size, size <= limit, per_s(size), 10 * size)


@pytest.mark.parametrize("most", [1, 2, 3, 64, 100, 4096])
def test_the_largest_size_is_found_up_to_an_eighth(most):
    for limit in {1, 2, 3, 5, 63, 64, 99, 100, 3000, 4096} | {most}:
        tried = batch_size.search(up_to(limit), most)
        largest = max(one.size for one in tried if one.fits)
        assert largest <= min(limit, most)
        assert min(limit, most) - largest <= max(1, largest // 8)
        assert len({one.size for one in tried}) == len(tried) < 20


def test_where_nothing_fits_one_sample_is_the_last_attempt():
    tried = batch_size.search(up_to(0), 64)
    assert [(one.size, one.fits) for one in tried] == [(1, False)]
    assert "not even" in batch_size.text(tried, 64, given=64, ranks=1, memory=None)


def test_the_text_names_keys_a_margin_and_sizes_that_are_no_faster():
    def told(limit, most, **options):
        return batch_size.text(batch_size.search(up_to(limit, **options), most), most, given=64, ranks=2, memory=None)

    assert "keys: batch.micro=27" in told(31, 32)  # 30 samples ran, and nine tenths are advised
    whole = told(32, 32)
    assert "keys: batch.micro=32" in whole
    assert "the rank's whole share" in whole
    assert "fits: 4, the limit of --most" in told(4, 4)
    larger = told(128, 128)
    assert "keys: batch.global=256 batch.micro=128" in larger
    assert "is a different training" in larger
    assert "larger is not faster: 8 has 8 samples/s" in told(32, 32, per_s=lambda size: float(min(size, 8)))


def test_the_keys_suit_a_config_that_gives_samples_by_rank():
    tried = batch_size.search(up_to(32), 32)
    told = batch_size.text(tried, 32, given=64, ranks=2, memory=None, by_rank=True)
    keys = told.rpartition("keys: ")[2].split()
    config = config_file.load("digits", ["batch.global=null", "batch.per_rank=16", "batch.accumulate=2", *keys])
    assert (config.batch.global_, config.batch.micro, config.batch.per_rank) == (64, 32, None)


def test_each_size_has_the_keys_of_a_preset_but_those_of_the_command(tmp_path, monkeypatch):
    commands = []

    def measured(command, **_):
        commands.append(command)
        file = command[command.index("--json") + 1]
        Path(file).write_text(json.dumps({"measured": {"peak_bytes": 1, "step_seconds": 1.0}}))
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(batch_size.subprocess, "run", measured)
    (tmp_path / "mine.yaml").write_text("nproc: 2\nprecision: bf16\ndata: {workers: 3}\n")
    words = ["tune", "batch", "digits", "device=cpu", "precision=fp32", "--memory", "1GB", "--most", "2"]
    done = CliRunner().invoke(app, [*words, "--preset", str(tmp_path / "mine.yaml")])
    assert done.exit_code == 0, done.output
    (command,) = commands
    assert "data.workers=3" in command
    assert [one for one in command if one.startswith("precision")] == ["precision=fp32"]
    assert command[command.index("--nproc") + 1] == "2"


def test_an_attempt_is_judged_by_its_end_and_its_peak(tmp_path):
    file = tmp_path / "measured.json"

    def judged(code, errors="", memory=None):
        return batch_size._judged(8, 64, CompletedProcess([], code, "", errors), file, memory)

    file.write_text(json.dumps({"measured": {"peak_bytes": 1000, "step_seconds": 0.5}}))
    assert judged(0) == BatchSizeResult(8, True, 128.0, 1000)
    assert not judged(0, memory=999).fits
    assert judged(0, memory=1000).fits
    assert not judged(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB").fits
    assert not judged(-9).fits
    with pytest.raises(TrainingError, match="no such file"):
        judged(2, "error: no such file")


def test_on_a_cpu_the_limit_must_be_given():
    config = config_file.load("digits")
    with pytest.raises(UsageError, match="--memory 4GB"):
        batch_size.check(config, None, on_gpu=False)
    batch_size.check(config, 10**9, on_gpu=False)
    batch_size.check(config, None, on_gpu=True)
    with pytest.raises(UsageError, match="several epochs"):
        batch_size.check(config_file.load("digits", ["batch.micro={0: 8, 4: 4}"]), None, on_gpu=True)
