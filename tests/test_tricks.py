"""What the files in examples/tricks print: the right way is right, and each mistake costs what it should."""

import re
import runpy
import subprocess
import sys
import tempfile

import pytest
import torch

from tests import processes, trick_device
from tests.guide_commands import ROOT, numbers, output_of, run_script
from tests.processes import HANG_S
from tests.ranks import run_on_python_device, run_ranks


def on_two(name, wrong=""):
    """The numbers of each line that a trick prints on two ranks."""
    suffix = f" --wrong {wrong}" if wrong else ""
    output = output_of(f"torchrun --nproc-per-node 2 examples/tricks/{name}.py{suffix}")
    return [numbers(line.rpartition(": ")[2] if ": " in line else line) for line in output.splitlines()]


def test_two_ranks_by_hand_train_the_model_of_one_process():
    alone = output_of("python examples/tricks/00_one_process.py").splitlines()
    right = output_of("torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py").splitlines()
    assert right[:-1] == alone
    assert numbers(right[-1]) == [0]
    wrong = output_of("torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py --wrong").splitlines()
    assert numbers(wrong[-1])[0] > 0.01


def test_the_sampler_divides_the_samples_and_the_epoch_changes_the_order():
    steps, shared, same, _ = on_two("02_shards_and_epochs")
    assert (steps, shared) == ([23], [1, 1437])
    assert same[0] < 10
    assert on_two("02_shards_and_epochs", "set_epoch")[2] == [719, 719]
    assert on_two("02_shards_and_epochs", "sampler")[:2] == [[45], [1437, 1437]]


def test_accumulated_gradients_are_those_of_the_whole_batch_and_travel_once():
    counts, deviation, sent = on_two("03_accumulation")
    assert len(set(counts)) > 1
    assert deviation[0] < 1e-6
    assert sent == [9640]
    assert on_two("03_accumulation", "mean")[1][0] > 0.1
    _, deviation, sent = on_two("03_accumulation", "no_sync")
    assert deviation[0] < 1e-6
    assert sent == [8 * 9640]


@pytest.mark.exhaustive
def test_weights_in_16_bits_do_not_move():
    (_, moved, loss), (_, moved_wrong, loss_wrong) = (
        on_two("04_mixed_precision"),
        on_two("04_mixed_precision", "weights"),
    )
    assert moved[0] > 0.95
    assert moved_wrong[0] < 0.7
    assert loss_wrong[0] > loss[0]


def test_small_gradients_need_a_loss_scale():
    left_out, zero, deviation = on_two("05_loss_scaling")
    assert left_out[0] > 1e9  # the scale
    assert max(zero + deviation) < 0.01
    _, zero, deviation = on_two("05_loss_scaling", "unscaled")
    assert min(zero + deviation) > 0.1


def test_clipping_the_scaled_gradient_ends_the_learning():
    measured, applied, accuracy = on_two("06_clipping")
    assert measured[0] > applied[0] == 1
    assert accuracy[0] > 0.8
    _, applied, accuracy = on_two("06_clipping", "scaled")
    assert applied[0] < 1e-4
    assert accuracy[0] < 0.3


@pytest.mark.exhaustive
def test_a_larger_batch_needs_a_larger_rate():
    scaled, unscaled = on_two("07_learning_rate"), on_two("07_learning_rate", "unscaled")
    assert scaled[0] == unscaled[0]
    assert scaled[1][-1] > scaled[0][-1] - 0.04
    assert unscaled[1][-1] < scaled[1][-1] - 0.1
    assert on_two("07_learning_rate", "no_warmup")[1][-1] < scaled[1][-1]


def test_metrics_are_computed_from_sums():
    (loss, _), (f1,) = on_two("08_metrics")
    of_rank_0, mean_of_means, mean_f1 = (line[-1] for line in on_two("08_metrics", "averages"))
    assert loss != of_rank_0
    assert loss != mean_of_means
    assert f1 != mean_f1


def test_padding_counts_samples_twice():
    assert on_two("09_evaluation")[0][1:] == [101, 101]
    assert on_two("09_evaluation", "padded")[0][1:] == [128, 101]


def test_a_checkpoint_is_complete_or_absent_and_has_all_that_the_next_step_needs():
    assert on_two("10_checkpoint") == [[20, 10], [0]]
    assert on_two("10_checkpoint", "in_place") == [[20, 0], [0]]
    began, difference = on_two("10_checkpoint", "optimizer")
    assert began == [20, 10]
    assert difference[0] > 0.01


def test_the_order_and_the_noise_do_not_depend_on_the_ranks():
    assert on_two("11_order_and_seeds")[0][-1] < 1e-6
    assert on_two("11_order_and_seeds", "seeds")[0][-1] > 1e-3
    assert on_two("11_order_and_seeds", "order")[0][-1] > 1e-3


def test_ranks_that_compare_their_steps_notice_that_they_are_apart():
    assert on_two("12_failing_and_hanging") == [[5, 6]]


@pytest.mark.exhaustive  # it waits
def test_ranks_that_are_apart_mix_gradients_until_they_wait_in_vain():
    assert on_two("12_failing_and_hanging", "unchecked") == [[0, 3, 22, 17]]
    assert "Rank 1 failed to pass monitoredBarrier" in output_of(
        "torchrun --nproc-per-node 2 examples/tricks/12_failing_and_hanging.py --wrong barrier"
    )


def test_sharding_divides_the_memory_and_keeps_the_training():
    with_ddp, with_fsdp, largest, deviation, *arithmetic = on_two("13_sharding")
    assert with_ddp == [66560, 66560, 133120]
    assert with_fsdp == [33280, 33280, 66560]
    assert largest == [16640]
    assert deviation[0] < 1e-6
    assert [line[-1] for line in arithmetic] == [112, 14, 1.75]
    assert on_two("13_sharding", "one_block")[2] == [66560]


def test_what_a_step_sends_does_not_depend_on_the_batch():
    assert on_two("14_scaling")[:2] == [[23, 9640, 23 * 9640], [3, 9640, 3 * 9640]]


@pytest.mark.parametrize(("world", "wrong", "odd"), [(4, "", []), (4, " --wrong", [3]), (2, " --wrong", [1])])
def test_a_probe_finds_the_rank_that_differs(world, wrong, odd):
    own, same, others, tensor = output_of(
        f"torchrun --nproc-per-node {world} examples/tricks/15_probe.py{wrong}"
    ).splitlines()
    assert len(set(numbers(own))) == world
    assert len(numbers(same)) == world
    assert numbers(others) == odd
    assert tensor == (f"the first tensor that differs on ranks {odd}: 1.weight" if wrong else "no tensor differs")


def test_tokens_of_short_texts_weigh_more_by_the_mean_of_means():
    counts, weights, losses, apart = on_two("16_tokens")
    assert counts == [3, 13, 212, 292]
    assert weights == [1, 1, 1, 1]
    assert losses[0] == losses[1]
    assert apart[0] < 1e-5
    _, weights, losses, apart = on_two("16_tokens", "means")
    assert weights[0] > 40 * weights[2]
    assert losses[0] < losses[1]
    assert apart[0] > 1


def test_ddp_averages_the_gradients_of_ranks_that_call_it():
    right = output_of("torchrun --nproc-per-node 2 examples/tricks/17_inside_ddp.py")
    assert "gradient of last afterwards: [3, 6] on rank 0, [3, 6] on rank 1" in right
    assert right.count("is sent") == 3
    bypassed = output_of("torchrun --nproc-per-node 2 examples/tricks/17_inside_ddp.py --wrong")
    assert "gradient of last afterwards: [2, 4] on rank 0, [4, 8] on rank 1" in bypassed
    assert "is sent" not in bypassed


def test_ddp_waits_for_unused_parameters_unless_it_searches_for_them():
    script = "torchrun --nproc-per-node 2 examples/tricks/18_unused_parameters.py"
    assert "{'a': 2.0, 'b': 3.0, 'c': None}" in output_of(script)
    assert "step 2: RuntimeError: Expected to have finished reduction" in output_of(f"{script} --wrong")


def test_each_block_is_gathered_twice_in_a_sharded_step():
    lines = output_of("torchrun --nproc-per-node 2 examples/tricks/19_sharded_step.py").splitlines()
    at = lines.index("backward")
    assert [line for line in lines if "all_gather" in line][:3] == [line for line in lines[:at] if "all_gather" in line]
    assert sum("all_gather" in line for line in lines[at:]) == 3
    assert sum("reduce_scatter" in line for line in lines[at:]) == 3
    wrong = output_of("torchrun --nproc-per-node 2 examples/tricks/19_sharded_step.py --wrong")
    assert wrong.startswith("NotImplementedError")


def test_details_around_a_step():
    drawn, read, *_, zero, rates = on_two("20_details")
    assert sorted(drawn) == sorted(read), "the sampler and the loader name the same samples"
    assert zero == [1]
    assert rates == [0.8, 0.2, 0.05]


@pytest.mark.exhaustive
def test_all_tricks_by_hand_and_in_lockstep_learn_the_digits():
    assert on_two("98_all_by_hand")[-1][-1] > 0.85
    assert on_two("99_lockstep")[-1][-1] > 0.85
    assert on_two("99_lockstep")[:1] == on_two("99_lockstep")  # rank 0 alone prints


def test_the_training_by_hand_goes_on_where_it_was_stopped(tmp_path):
    script = "examples/tricks/98_all_by_hand.py"
    whole = "".join(run_ranks(2, run_script, str(tmp_path), script))
    path = tmp_path / "runs" / "by_hand.pt"
    assert torch.load(path)["step"] == 138
    assert "".join(run_ranks(2, run_script, str(tmp_path), script)) == ""
    assert len(whole.splitlines()) == 6


def test_the_lines_are_counted():
    *tricks, itself, everything = output_of("python examples/tricks/count_lines.py").splitlines()[1:]
    lines = [numbers(line.split("   ")[-2] if "," in line else line) for line in tricks]
    assert len(lines) == 12
    by_hand, in_lockstep = numbers(everything)
    assert in_lockstep < by_hand / 2
    assert numbers(itself)[0] < by_hand


def test_a_trick_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tricks"))
    for name in ("00_one_process", "01_ddp_by_hand", "02_shards_and_epochs", "14_scaling", "98_all_by_hand"):
        path = str(ROOT / "examples" / "tricks" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, "--device", "cuda"])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(path, run_name="__main__")
        assert caught.value.code == 2
        assert re.search(r"--device cuda: .*torch sees (no GPU|0) here", capsys.readouterr().err), name


def test_a_trick_that_is_told_a_device_takes_it():
    assert on_two("09_evaluation", "padded --device cpu") == on_two("09_evaluation", "padded")


ON_A_DEVICE = ["08_metrics", "09_evaluation"]
MORE_ON_A_DEVICE = [
    *["02_shards_and_epochs", "03_accumulation", "04_mixed_precision", "05_loss_scaling", "06_clipping"],
    *["07_learning_rate", "10_checkpoint", "12_failing_and_hanging", "14_scaling", "15_probe"],
]


@pytest.mark.parametrize(
    "name", [*ON_A_DEVICE, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_ON_A_DEVICE)]
)
def test_a_trick_does_not_mix_the_cpu_with_its_device(name):
    """Whatever the ranks sum is on the device, as NCCL needs it."""
    printed, sent = run_on_python_device(trick_device.run_trick, name)
    assert printed or name == "12_failing_and_hanging"  # which prints nothing where all goes well
    assert set(sent) <= {"pygpu"}
    assert sent or name not in ON_A_DEVICE


END = """
import sys
import weakref

sys.path.insert(0, {folder!r})
import toy

toy.start()
model = toy.torch.nn.parallel.DistributedDataParallel(toy.make_model())


def end(leave=toy.leave, model=weakref.ref(model), dist=toy.dist):
    leave()
    print(model() is None, dist.is_initialized())


end()
"""


def test_a_trick_drops_its_model_and_then_leaves_the_group(tmp_path):
    script = tmp_path / "end.py"
    script.write_text(END.format(folder=str(ROOT / "examples" / "tricks")))
    assert run_ranks(2, run_script, str(tmp_path), str(script)) == ["True False\n"] * 2


@pytest.mark.exhaustive  # each starts torch anew
@pytest.mark.parametrize("name", ["01_ddp_by_hand", "05_loss_scaling", "13_sharding", "98_all_by_hand", "99_lockstep"])
def test_files_run_under_torchrun(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, str(ROOT / "examples" / "tricks" / f"{name}.py")],
            capture_output=True,
            text=True,
            cwd=folder,
            env=processes.environment(),
            timeout=HANG_S,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout
