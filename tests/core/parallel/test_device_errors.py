"""Errors of a GPU, with the texts that torch gives them: what is advised, and whether a restart can help."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from lockstep.core.devices import Cuda
from lockstep.core.errors import DeviceError, LockstepError, UsageError
from lockstep.core.parallel import device_errors, world
from lockstep.launch import agent, decision, launcher, rank_output, start
from lockstep.launch.rank_output import Tail
from tests.launch import abort_cases
from tests.ranks import run_ranks

ASSERT = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""
KERNEL = "Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: [{},0,0] Assertion `t >= 0 && t < n_classes` failed."
TERMINATED = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  " + ASSERT


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(device_errors, "_lost", [])


def test_assertion_in_a_kernel_is_explained_and_not_tried_again():
    with pytest.raises(DeviceError, match="device-side assert triggered") as caught, device_errors.explained():
        raise torch.AcceleratorError(ASSERT)
    assert "number of classes" in caught.value.remedy
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.remedy
    assert "test_device_errors.py" in caught.value.what  # the traceback
    assert not caught.value.retryable
    assert device_errors.has_lost_device()


def test_other_errors_of_a_gpu_are_tried_again():
    with pytest.raises(DeviceError) as caught, device_errors.explained():
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert "Xid" in caught.value.remedy
    assert caught.value.retryable


def asserting():
    """On rank 1, a kernel asserts while rank 0 waits for it. What each rank raises."""
    try:
        with world.join_world("cpu") as here:
            if here.rank == 1:
                raise torch.AcceleratorError(ASSERT)
            here.all_sum([1.0])
    except LockstepError as error:
        return type(error).__name__, error.retryable, str(error)


def test_all_ranks_know_that_an_assertion_would_come_again():
    other, own = run_ranks(2, asserting)
    assert (own[0], own[1]) == ("DeviceError", False)
    assert (other[0], other[1]) == ("RankError", False)
    assert "rank 1 failed" in other[2]
    assert "number of classes" in other[2]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        ValueError("x"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, device_errors.explained():
        raise error
    assert caught.value is error
    assert not device_errors.has_lost_device()


def test_an_error_of_a_gpu_is_found_behind_another_error():
    try:
        try:
            raise RuntimeError(ASSERT)
        except RuntimeError as cause:
            raise ValueError("the batch is bad") from cause
    except ValueError as error:
        device_errors.note(error)
    assert device_errors.has_lost_device()


def test_last_lines_leave_out_what_repeats():
    tail = Tail()
    for thread in range(1000):
        tail.add(KERNEL.format(thread) + "\n")
    tail.add(TERMINATED[:30])
    tail.add(TERMINATED[30:] + "\nframe #0: c10::Error::Error() + 0x98\n\nunfinished")
    assert tail.last(20) == [KERNEL.format(0), *TERMINATED.split("\n"), "unfinished"]
    assert tail.last(1) == ["unfinished"]


def test_rank_that_aborts_is_quoted_and_advised_and_not_started_again(tmp_path, capfd):
    said = f"{KERNEL.format(5)}\n{TERMINATED}\n"
    failures = agent.run_ranks(
        abort_cases.abort_on_rank_1, (said,), nproc=2, folder=tmp_path, start=start.on_one_node(2)
    )
    cause, retryable, _ = decision.first_cause(launcher.rank_failures(failures))
    assert "rank 1 was killed by signal 6 (SIGABRT); the last lines of its stderr:\n    Loss.cu:250" in cause.what
    assert "device-side assert triggered" in cause.what
    assert "number of classes" in cause.remedy
    assert not retryable
    assert capfd.readouterr().err.count("Loss.cu:250") == 1  # the terminal has it too


def ended(code, lines=(), text=""):
    words = {"message": {"message": text, "extraInfo": {"last_lines": list(lines)}}} if lines or text else {}
    failure = SimpleNamespace(exitcode=code, error_file_data=words, timestamp=1)
    failure.signal_name = lambda: signal.Signals(-code).name
    return failure


def killed(number, lines=(), text=""):
    return decision.first_cause(launcher.rank_failures({3: ended(-number, lines, text)}))


def test_end_by_nccl_is_advised_and_tried_again():
    cause, retryable, _ = killed(signal.SIGABRT, ["NCCL error: remote process exited or there was a network error"])
    assert "look at the other ranks first" in cause.remedy
    assert retryable
    assert killed(signal.SIGABRT)[0].remedy is None


def test_rank_that_nccl_ended_is_not_the_cause_where_another_rank_failed():
    by_nccl = ended(-signal.SIGABRT, ["[Rank 0] NCCL watchdog thread terminated with exception: remote process exited"])
    cause, _, _ = decision.first_cause(launcher.rank_failures({0: by_nccl, 1: ended(1, text="ValueError: the cat")}))
    assert cause.what == "rank 1 failed: ValueError: the cat"
    asserted = ended(-signal.SIGABRT, ["NCCL watchdog thread terminated", *ASSERT.split("\n")])
    cause, retryable, _ = decision.first_cause(launcher.rank_failures({0: by_nccl, 1: asserted}))
    assert cause.what.startswith("rank 1 was killed by signal 6")
    assert not retryable


def test_rank_that_was_killed_after_its_report_is_named_with_its_own_words():
    cause, _, _ = killed(signal.SIGABRT, text="ValueError: the cat")
    assert cause.what == "rank 3 failed: ValueError: the cat"
    assert cause.exit_code == 1


def test_stderr_of_ranks_stays_a_terminal(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    output = rank_output.RankOutput()
    with output.writer(0) as writer:
        monkeypatch.undo()
        assert os.isatty(writer.fileno())
        os.write(writer.fileno(), b"one\r\n")
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content))
    output.start()
    output.close()
    assert output.tails[0].last(5) == ["one"]


def test_lines_of_other_ranks_begin_with_the_rank(monkeypatch):
    output, shown = rank_output.RankOutput(), []
    for rank in (0, 12):
        with output.writer(rank) as writer:
            os.write(writer.fileno(), b"a warning\n\n[rank 12] an error\nhalf")
    monkeypatch.setattr(os, "write", lambda descriptor, content: shown.append(content) or len(content))
    output.start()
    output.close()
    assert shown == [
        b"a warning\n\n[rank 12] an error\nhalf",
        b"[rank 12] a warning\n\n[rank 12] an error\n[rank 12] half",
    ]
    assert output._named(12, b" a line") == b" a line"
    assert output._named(12, b"\nmore\n") == b"\n[rank 12] more\n"
    assert output._named(12, b"more\n") == b"[rank 12] more\n"
    assert output.tails[12].last(1) == ["half"]


# ---- one GPU for each rank


class Gpus:
    def __init__(self, monkeypatch, count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("LOCKSTEP_LAUNCHED", raising=False)


def test_rank_that_sees_a_single_gpu_takes_it(monkeypatch):
    Gpus(monkeypatch, 1)
    assert world.pick_device("auto", 3, 4) == torch.device("cuda", 0)  # srun --gpus-per-task=1
    assert world.pick_device("auto", 3, 1) == torch.device("cuda", 0)  # srun sets no LOCAL_WORLD_SIZE
    monkeypatch.setenv("LOCKSTEP_LAUNCHED", "1")
    with pytest.raises(UsageError, match="2 ranks on a machine with 1 GPU"):
        world.pick_device("auto", 1, 2)


def test_local_rank_without_a_gpu_is_an_error(monkeypatch):
    Gpus(monkeypatch, 2)
    assert world.pick_device("auto", 1, 2) == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="local rank 3 needs its own GPU, and 2 GPUs are visible"):
        world.pick_device("auto", 3, 1)


def test_two_ranks_with_the_same_gpu_are_an_error(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(Cuda, "identity", lambda device: "GPU-1")
    first, second = (world.World(rank, 2, rank, torch.device("cuda", 0)) for rank in range(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    world._check_own_device(first, store)
    world._check_own_device(first, store)
    with pytest.raises(UsageError, match=r"ranks 0 and 1 on .* have the same GPU") as caught:
        world._check_own_device(second, store)
    assert "--gpus-per-task=1" in caught.value.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    world._check_own_device(second, store)
    monkeypatch.setattr(Cuda, "identity", lambda device: "GPU-2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    world._check_own_device(second, store)
