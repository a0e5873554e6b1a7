"""The rules of the advice on a run, on made-up logs: each finds its cause, names the keys, and is silent otherwise."""

import json

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.plan import advise
from lockstep_lab.plan.run_figures import Figures
from lockstep_lab.report import run as runs
from packages.lab.tests.report.cases import TIME, write_run

GPU = {"device": "NVIDIA H100 80GB HBM3", "device_memory": 80 * 2**30, "cpus": 32}
START = "{at}  lockstep 0.1.0, torch 2.13.0, {world} ranks on {device}, from step {step}"


def made_up(
    folder, *, world=1, device="cpu", steps=100, log=(), environment=None, evaluations=None, starts=(), **options
):
    """The figures of a complete run that logs every 10 steps of 64 samples, at 0.1 s a step. Nothing is at fault.

    Args:
        starts: the steps from which later starts went on, each with a clock of its own. `log` has their lines.
        evaluations: seconds of each evaluation. There is one every 50 steps.
        options: `figures` of every entry; `memory` of the first; sections of the config.
    """
    figures, memory = options.pop("figures", {}), options.pop("memory", {})
    usual = {"train/loss": 1.0, "train/samples_per_s": 640.0, "train/wait_share": 0.01, "train/skipped": 0}
    usual |= {"time/saving_s": 0.0}
    clock, rows = 0.0, []
    for step in range(10, steps + 1, 10):
        clock = 1.0 if step - 10 in starts else clock + 1.0
        row = usual | figures | ({f"memory/{name}": value for name, value in memory.items()} if step == 10 else {})
        clock += row["time/saving_s"]
        rows.append({"step": step, "epoch": step / 10, "time_s": clock, **row})
        if evaluations and step % 50 == 0:
            clock += evaluations
            rows.append(
                {"step": step, "epoch": step / 10, "time_s": clock, "eval/loss": 1.0, "time/evaluation_s": evaluations}
            )
    sections = {"batch": {"global": 64}, "checkpoint": {}, "precision": "bf16"} | options
    lines = [START.format(at=TIME.format(0), world=world, device=device, step=0)]
    lines += [*log, f"{TIME.format(50)}  step {steps}/{steps}  epoch 1.00  loss 1"]
    write_run(folder, rows=rows, log=lines, **sections)
    about = {"world": world, "device": "x86_64", "cpus": 8} | (environment or {})
    (folder / "environment.json").write_text(json.dumps(about))
    return Figures(runs.read(folder))


def by_rank(**times):
    """The figures of each rank, in milliseconds of a step of 100."""
    return {f"health/{name}_ms/rank{rank}": ms for name, values in times.items() for rank, ms in enumerate(values)}


def advice(folder, **options):
    """The advice by its name."""
    found = advise.of_figures(made_up(folder, **options)).advice
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def on_gpu(folder, **options):
    return advice(folder, device="cuda", environment=GPU, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_that_is_well_gets_no_advice(tmp_path, device):
    ranks = by_rank(compute=[30, 30], data_wait=[1, 1])
    memory = {f"peak_mb{rank}": 60_000.0 for rank in ("", "/rank0", "/rank1")}
    options = {
        "figures": ranks | {"train/mfu": 0.45},
        "memory": memory | {"activations_mb": 50_000.0},
        "evaluations": 0.1,
    }
    advised = advise.of_figures(made_up(tmp_path, world=2, device=device, environment=GPU, **options))
    assert advised.advice == []
    assert "Nothing in this log limits the run" in advise.text(advised)
    assert sum(advised.shares.values()) == pytest.approx(1, abs=1e-3)


def test_waiting_for_data_without_workers(tmp_path):
    found = advice(tmp_path, figures={"train/wait_share": 0.7})["waiting for data"]
    # Loading takes 0.7 / 0.3 of the time of computing: three workers keep up, and one is to spare.
    assert found.changes == ("data.workers=4",)
    assert found.saves_share == pytest.approx(0.7)
    assert "70%" in found.finding
    assert "3.3 times as fast" in found.gain
    assert "train/wait_share 0.70" in found.source
    # Of 640 samples/s at 30 %: 2,133 without waits. One process loads 640 / 0.7.
    assert "about 2,133 samples/s; 1 rank loads about 914 each, so 3 processes keep up" in found.note


def test_waiting_for_data_with_workers_and_pictures(tmp_path):
    sections = {"data": {"train": "x", "workers": 4}, "task": {"kind": "classification"}}
    found = advice(tmp_path, figures={"train/wait_share": 0.5}, **sections)["waiting for data"]
    assert found.changes == ("data.workers=9", "data.cache=decoded")
    assert "exceed the 8 CPU threads" in found.note
    assert "about 1,280 samples/s; 4 workers load about 160 each, so 8 processes keep up" in found.note
    assert "needs 3 bytes per pixel on the disk (0.56 MB for 500x375" in found.note
    sections["data"]["cache"] = "decoded"
    assert advice(tmp_path, figures={"train/wait_share": 0.5}, **sections)["waiting for data"].changes == (
        "data.workers=9",
    )


def test_the_rank_that_waits_for_data_is_named(tmp_path):
    ranks = by_rank(data_wait=[1, 61, 1])
    found = advice(tmp_path, world=3, figures={"train/wait_share": 0.21} | ranks)["waiting for data"]
    assert "Rank 1 waits for data 61%" in found.finding
    assert found.saves_share == pytest.approx(0.61)


def test_a_slow_rank_is_named(tmp_path):
    times = by_rank(compute=[10, 30], data_wait=[0, 0])
    found = advice(tmp_path, world=2, figures=times)["a slow rank"]
    assert "Rank 1 computes more slowly" in found.finding
    assert "3.0 times as long" in found.finding
    assert found.saves_share == pytest.approx(0.2)
    assert found.changes == ()
    assert "60% if its last backward pass is also slower" in found.gain
    # With compiled blocks under fsdp, the times are not known, and logged as 0.
    unknown = by_rank(compute=[0, 0], data_wait=[0, 0])
    assert "a slow rank" not in advice(tmp_path, world=2, figures=unknown, parallel={"strategy": "fsdp"})


def test_a_rank_that_is_slow_now_and_then_is_not_blamed(tmp_path):
    figures = made_up(tmp_path, world=2, figures=by_rank(compute=[10, 10], data_wait=[0, 0]))
    values = figures.metrics.series["health/compute_ms/rank1"].values
    values[5], values[7] = 60, 70  # of the later entries, from 5 to 9: a mean of 32
    assert "a slow rank" not in [found.name for found in advise.of_figures(figures).advice]
    values[5:9] = 30
    assert "a slow rank" in [found.name for found in advise.of_figures(figures).advice]


def test_a_damaged_run_is_not_said_to_be_without_limits(tmp_path):
    made_up(tmp_path, figures={"train/wait_share": None})
    shown = advise.text(advise.advise(tmp_path))
    assert "does not show how long training waits for data" in shown
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    (tmp_path / "config.yaml").write_text("{[")
    lost = advise.text(advise.advise(tmp_path))
    assert "so there is no advice" in lost
    assert "metrics.jsonl: 1 line is damaged" in lost
    assert "config.yaml is missing: values of keys below are defaults" in lost
    assert "Nothing in this log limits" not in shown + lost


def test_small_gains_are_told_with_two_decimals():
    assert advise.less_time(0.06) == "up to 6% less time (1.06 times as fast)"
    assert advise.less_time(0.72) == "up to 72% less time (3.6 times as fast)"


def test_saving_that_holds_up_the_training(tmp_path):
    checkpoint = {"every_steps": 1, "mode": "sync"}
    found = advice(tmp_path, figures={"time/saving_s": 1.0}, checkpoint=checkpoint)["saving"]
    assert found.changes == ("checkpoint.mode=async", "checkpoint.every_steps=0", "checkpoint.every_minutes=1")
    assert "50% of the time" in found.finding
    assert found.saves_share == pytest.approx(0.5)
    assert not advice(tmp_path, figures={"time/saving_s": 0.01}, checkpoint=checkpoint)


def test_evaluations_that_take_long(tmp_path):
    found = advice(tmp_path, evaluations=5.0, train={"eval_every_epochs": 5})["evaluating"]
    assert found.changes == ("train.eval_every_epochs=10",)  # there are only two evaluations
    assert "50% of the time" in found.finding
    assert found.saves_share == pytest.approx(0.25)
    assert not advice(tmp_path, evaluations=1.0)


def test_crashes_whose_steps_are_done_again(tmp_path):
    log = [
        f"{TIME.format(10)}  step 60/100  epoch 1.00  loss 1",
        START.format(at=TIME.format(20), world=1, device="cpu", step=20),
        f"{TIME.format(21)}  step 60/100  epoch 1.00  loss 1",
        f"{TIME.format(22)}  stopped by SIGTERM at step 60 of 100, saved",
        START.format(at=TIME.format(30), world=1, device="cpu", step=60),
    ]
    figures = made_up(tmp_path, log=log, starts=(20, 60), figures={"time/saving_s": 0.001})
    assert figures.lost.restarts == 1  # the other start was asked to stop
    assert figures.lost.steps == 40
    found = {one.name: one for one in advise.of_figures(figures).advice}["restarts"]
    assert "40 steps were repeated: 40% of the time" in found.finding
    # A save takes 0.01 s, and the run 10.01 s: sqrt(2 x 0.01 x 10.01) s.
    assert found.changes == ("checkpoint.every_minutes=0.00746",)


def test_fp32_on_a_gpu(tmp_path):
    assert on_gpu(tmp_path, precision="fp32")["fp32"].changes == ("precision=bf16",)
    old = GPU | {"device": "Tesla V100-SXM2-16GB"}
    found = advice(tmp_path, device="cuda", environment=old, precision="fp32")["fp32"]
    assert found.changes == ("precision=fp16",)
    assert "fp32" not in advice(tmp_path, precision="fp32")  # on the CPU


def test_steps_that_overflow(tmp_path):
    found = on_gpu(tmp_path, precision="fp16", figures={"train/skipped": 20})["skipped steps"]
    assert "20 of 100 steps" in found.finding
    assert found.saves_share == pytest.approx(0.2)


def test_a_gpu_that_computes_little(tmp_path):
    figures = {"train/mfu": 0.1, "train/samples_per_s": 64_000.0}
    memory = {"peak_mb": 70_000.0, "activations_mb": 60_000.0}
    found = on_gpu(tmp_path, figures=figures, memory=memory, task={"kind": "segmentation"})["low utilisation"]
    assert found.changes == ("compute.compile=auto", "compute.channels_last=true")
    assert "1.0 ms: the host probably" in found.finding
    assert "3.0 times as fast at 30 %" in found.gain
    slow = on_gpu(tmp_path, figures={"train/mfu": 0.1}, memory=memory)["low utilisation"]
    assert "host" not in slow.finding


def test_exchange_that_takes_long(tmp_path):
    times = by_rank(compute=[10, 10], data_wait=[10, 10])
    found = advice(tmp_path, world=2, figures={"train/wait_share": 0.01} | times)["exchange and updates"]
    assert "About 60%" in found.finding
    assert found.changes == ("batch.global=128",)


def test_accumulation_that_is_not_needed(tmp_path):
    memory = {"peak_mb": 15_000.0, "activations_mb": 10_000.0}
    found = on_gpu(tmp_path, batch={"global": 64, "micro": 8}, memory=memory, figures={"train/mfu": 0.4})
    # 0.9 x 81,920 - 5,000 MiB hold 54 samples at 1,250 MiB each: two passes of 32.
    assert found["accumulation"].changes == ("batch.micro=32",)
    assert "8 forward passes of 8 samples" in found["accumulation"].finding
    memory["activations_mb"], memory["peak_mb"] = 5_000.0, 10_000.0
    found = on_gpu(tmp_path, batch={"global": 64, "micro": 8}, memory=memory, figures={"train/mfu": 0.4})
    assert found["accumulation"].changes == ("batch.micro=null",)
    memory["activations_mb"], memory["peak_mb"] = 40_000.0, 60_000.0
    assert not on_gpu(tmp_path, batch={"global": 64, "micro": 32}, memory=memory, figures={"train/mfu": 0.4})


def test_free_memory_and_an_idle_gpu(tmp_path):
    memory = {"peak_mb": 10_000.0, "activations_mb": 8_000.0}
    found = on_gpu(tmp_path, memory=memory, figures={"train/mfu": 0.25})["small batches"]
    assert found.changes == ("batch.global=512",)  # (0.9 x 81,920 - 2,000) / 8,000 of 64, rounded down
    assert "88% of the GPU's memory is free" in found.finding


def test_savings_of_memory_that_are_not_needed(tmp_path):
    memory = {"peak_mb": 12_000.0, "parameters_mb": 1000.0, "gradients_mb": 1000.0, "optimizer_mb": 2000.0}
    options = {"world": 8, "memory": memory, "parallel": {"strategy": "fsdp"}}
    found = on_gpu(tmp_path, compute={"activation_checkpointing": True}, **options)
    assert found["recomputation"].changes == ("compute.activation_checkpointing=false",)
    assert found["sharding"].changes == ("parallel.strategy=ddp",)
    assert "40,000 of 81,920 MiB" in found["sharding"].finding
    memory["peak_mb"] = 50_000.0
    assert not on_gpu(tmp_path, compute={"activation_checkpointing": True}, **options)


def test_ranks_with_unequal_memory(tmp_path):
    memory = {"peak_mb": 3000.0, "peak_mb/rank0": 1000.0, "peak_mb/rank1": 3000.0}
    memory |= {"activations_mb/rank0": 400.0, "activations_mb/rank1": 2300.0}
    memory |= {"other_mb/rank0": 300.0, "other_mb/rank1": 400.0}
    found = advice(tmp_path, world=2, memory=memory)["memory by rank"]
    assert found.finding == "Rank 1 needs 2,000 MiB more than rank 0, mostly in activations"
    assert "memory/activations_mb 2,300 and 400" in found.source
    memory["peak_mb/rank0"] = 2900.0
    assert not advice(tmp_path, world=2, memory=memory)


def test_memory_that_did_not_suffice(tmp_path):
    (tmp_path / "micro.json").write_text(json.dumps({"asked": [[0, 64]], "world": 1, "micro": 16}))
    found = on_gpu(tmp_path)["out of memory"]
    assert found.changes == ("batch.micro=16",)
    assert "micro-batches were reduced from 64 to 16 samples" in found.finding
    (tmp_path / "micro.json").write_text("[]")
    assert "out of memory" not in on_gpu(tmp_path)


def test_the_largest_gain_comes_first(tmp_path):
    figures = {"train/wait_share": 0.2, "time/saving_s": 1.0}
    assert list(advice(tmp_path, figures=figures))[:2] == ["saving", "waiting for data"]


def test_a_run_that_goes_on(tmp_path):
    figures = made_up(tmp_path, steps=40)
    log = (tmp_path / "train.log").read_text().replace("40/40", "40/400")
    (tmp_path / "train.log").write_text(log)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "tra')  # a line that is being written
    said = advise.text(advise.advise(tmp_path))
    assert "360 steps are left, about 36 s" in said
    assert figures.step_s == pytest.approx(0.1)


def test_a_run_without_entries(tmp_path):
    made_up(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    advised = advise.advise(tmp_path)
    assert advised.advice == []
    assert "no training entries" in advise.text(advised)
    json.dumps(advise.as_json(advised), allow_nan=False)


def test_no_run_directory(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        advise.advise(tmp_path)


def test_a_damaged_config_and_environment_do_no_harm(tmp_path):
    made_up(tmp_path)
    (tmp_path / "config.yaml").write_text("batch: 3\ntrain: [1]\ndata: {workers: many}\nparallel: null\n")
    (tmp_path / "environment.json").write_text('{"world": "two", "device": 3, "device_memory": -1, "cpus": true}')
    assert str(tmp_path) in advise.text(advise.advise(tmp_path))
