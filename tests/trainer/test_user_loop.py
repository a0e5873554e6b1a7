"""`Loop`: a user's own loop ends with the weights of the same `Task`, and of plain torch."""

import copy
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep.core.errors import Preempted, RankError, UsageError
from lockstep.trainer import user_exit
from lockstep_lab.verify.workers import WorkerEnded
from tests import own_tasks, ranks, runs
from tests.processes import HANG_S
from tests.ranks import run_ranks

QUIET = {"quiet": True, "config": {"log.writers": ["json_lines"], "device": "cpu"}}
SETTINGS = {"log": {"writers": ["json_lines"], "every_steps": 5, "pictures": 0, "flops": False}, "device": "cpu"}


def loop_of(task, folder, steps=20, scheduler=None, **options):
    """A loop over the data of a task, and its model."""
    torch.manual_seed(0)
    model = task.model()
    fused = options.get("strategy") != "fsdp"  # as a Task has it
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
    options = {"config": SETTINGS, "global_batch": 24, "quiet": True, "run_dir": folder} | options
    made = scheduler(optimizer) if scheduler else None
    return lockstep.Loop(model, optimizer, task.train_data(), steps=steps, scheduler=made, **options)


def squared(loop, batch):
    inputs, targets, mask = batch
    return ((loop.model(inputs) - targets).square() * mask).sum()


def masked_body(loop, *, stop=None):
    """Train on the mean over the valid labels of each micro-batch, of which the body knows the number."""
    for step in loop:
        for inputs, targets, mask in step:
            error = ((loop.model(inputs) - targets).square() * mask).sum()
            step.backward(error / mask.sum().clamp(min=1), units=mask.sum())
        if step.number == stop:
            break


def trained_in_loop(options, units):
    """Weights of a loop on these ranks."""
    with runs.shared_folder() as folder:
        task = own_tasks.Masked()
        loop = loop_of(task, folder, units=task.weight if units else None, **options)
        if units:
            for step in loop:
                for batch in step:
                    step.backward(task.loss(loop.model, batch), reduction="sum")
        else:
            masked_body(loop)
        weights = runs.whole_weights(loop.model)
        loop.close()
        return weights


def trained_as_task(settings):
    return runs.fit(own_tasks.Masked(), runs.config(**settings))[0]


CASES = [
    (1, {}, {}),
    (2, {"micro_batch": 5}, {"batch": {"micro": 5}}),
    (3, {"micro_batch": 3, "clip_norm": 0.1}, {"batch": {"micro": 3}, "optim": {"clip_norm": 0.1}}),
    (2, {"strategy": "fsdp", "micro_batch": 7}, {"batch": {"micro": 7}, "parallel": {"strategy": "fsdp"}}),
]


def test_a_loop_ends_with_the_bits_of_the_same_task():
    for world, options, settings in CASES:
        loop = run_ranks(world, trained_in_loop, options, True)[0]
        task = run_ranks(world, trained_as_task, settings)[0]
        assert all(torch.equal(loop[name], task[name]) for name in task), (world, options)


@pytest.mark.exhaustive  # as test_a_loop_ends_with_the_bits_of_the_same_task
def test_units_that_only_the_body_knows_give_the_update_of_plain_torch():
    for world, options, _ in CASES:
        expected, _ = runs.by_hand(own_tasks.Masked(), clip_norm=options.get("clip_norm"))
        loop = run_ranks(world, trained_in_loop, options, False)[0]
        assert runs.difference(loop, expected) < 1e-10, (world, options)


def test_steps_without_a_unit_are_skipped_on_all_ranks():
    expected, norms = runs.by_hand(own_tasks.FewLabels())
    for world in (1, 2):
        assert runs.difference(run_ranks(world, trained_on_few_labels)[0], expected) < 1e-10, world
    assert len(norms) < 20


def trained_on_few_labels():
    with runs.shared_folder() as folder:
        loop = loop_of(own_tasks.FewLabels(), folder, micro_batch=5)
        masked_body(loop)
        assert loop._run.state.skipped > 0
        weights = runs.whole_weights(loop.model)
        loop.close()
        return weights


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def stopped_and_resumed(stop):
    """Weights, state and last rate of a loop that is left after `stop` steps, and made again in the same folder."""
    with runs.shared_folder() as folder:
        if stop:
            first = loop_of(own_tasks.Masked(), folder, scheduler=cosine, micro_batch=5)
            first.state["seen"] = []
            for step in first:
                for inputs, targets, mask in step:
                    step.backward(
                        ((first.model(inputs) - targets).square() * mask).sum(), units=mask.sum(), reduction="sum"
                    )
                first.state["seen"].append(step.number)
                if step.number == stop:
                    break
            first.close()
        loop = loop_of(own_tasks.Masked(), folder, scheduler=cosine, micro_batch=5)
        loop.state.setdefault("seen", [])
        for step in loop:
            for batch in step:
                step.backward(squared(loop, batch), units=batch[2].sum(), reduction="sum")
            loop.state["seen"].append(step.number)
        weights = runs.whole_weights(loop.model)
        loop.close()
        return weights, loop.state["seen"], loop.results["train/lr"]


@pytest.mark.exhaustive  # as test_steps_without_a_unit_are_skipped_on_all_ranks
def test_a_loop_that_was_left_resumes_with_its_state_and_scheduler():
    for world in (1, 2):
        whole, seen, rate = run_ranks(world, stopped_and_resumed, 0)[0]
        assert seen == list(range(1, 21))
        for stop in (7, 19):
            weights, again, resumed_rate = run_ranks(world, stopped_and_resumed, stop)[0]
            assert (again, resumed_rate) == (seen, rate), (world, stop)
            assert all(torch.equal(weights[name], whole[name]) for name in whole), (world, stop)


def test_a_loop_that_was_left_before_a_step_has_saved_the_step_before(tmp_path):
    loop = loop_of(own_tasks.Masked(), tmp_path / "run", steps=6)
    for step in loop:
        if step.number == 4:
            break
        for batch in step:
            step.backward(squared(loop, batch))
    weights = copy.deepcopy(loop.model.state_dict())
    loop.close()
    resumed = loop_of(own_tasks.Masked(), tmp_path / "run", steps=6)
    assert resumed.step == 3
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    assert next(iter(resumed)).number == 4
    resumed.close()


def test_a_body_that_evaluates_by_itself_trains_on_in_training_mode(tmp_path):
    loop = loop_of(own_tasks.Masked(), tmp_path / "run", steps=3)
    for step in loop:
        for batch in step:
            assert loop.model.training
            step.backward(squared(loop, batch))
        loop.model.eval()
    loop.close()


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)


def test_a_scheduler_that_cycles_betas_resumes_with_them(tmp_path):
    """`OneCycleLR` sets the betas of Adam, which are a tuple."""
    weights = {}
    for folder, stops in (("whole", [None]), ("cut", [3, None])):
        for stop in stops:
            loop = loop_of(own_tasks.Masked(), tmp_path / folder, steps=8, scheduler=one_cycle)
            for step in loop:
                for batch in step:
                    step.backward(squared(loop, batch))
                if step.number == stop:
                    break
            weights[folder] = copy.deepcopy(loop.model.state_dict())
            loop.close()
    assert all(torch.equal(weights["cut"][name], weights["whole"][name]) for name in weights["whole"])


def test_a_scheduler_that_the_loop_cannot_step_is_an_error(tmp_path):
    model, data = nn.Linear(2, 1), TensorDataset(torch.randn(8, 2))
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    cases = {
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer): "ReduceLROnPlateau needs a value",
        torch.optim.lr_scheduler.StepLR(other, 2): "belongs to another optimizer",
    }
    for scheduler, text in cases.items():
        with pytest.raises(UsageError) as caught:
            lockstep.Loop(model, optimizer, data, epochs=1, scheduler=scheduler, run_dir=tmp_path / "run", quiet=True)
        assert text in str(caught.value)


def by_plain_torch_with_schedule():
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)


def test_a_scheduler_gives_the_rates_of_a_plain_loop(tmp_path):
    data = TensorDataset(torch.randn(72, 10), torch.randn(72, 1))
    model, optimizer, scheduler = by_plain_torch_with_schedule()
    expected = []
    for _ in range(9):
        expected.append([optimizer.param_groups[0][key] for key in ("lr", "momentum")])
        optimizer.step()
        if len(expected) < 9:
            scheduler.step()
    model, optimizer, scheduler = by_plain_torch_with_schedule()
    loop = lockstep.Loop(
        model,
        optimizer,
        data,
        global_batch=8,
        epochs=1,
        scheduler=scheduler,
        run_dir=tmp_path,
        quiet=True,
        config=SETTINGS,
    )
    found = []
    for step in loop:
        for inputs, targets in step:
            found.append([optimizer.param_groups[0][key] for key in ("lr", "momentum")])
            step.backward((loop.model(inputs) - targets).square().mean())
    loop.close()
    assert found == expected


def test_rates_that_the_body_sets_count(tmp_path):
    data = TensorDataset(torch.randn(32, 10), torch.randn(32, 1))
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = lockstep.Loop(model, optimizer, data, global_batch=8, epochs=1, run_dir=tmp_path, **QUIET)
    for step in loop:
        before = copy.deepcopy(loop.model.state_dict())
        for inputs, targets in step:
            step.backward((loop.model(inputs) - targets).square().mean())
        changed = any(not torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
        assert changed == (step.number < 3)
        optimizer.param_groups[0]["lr"] = 0.0 if step.number == 2 else optimizer.param_groups[0]["lr"]
    loop.close()


def test_a_rate_that_the_body_sets_before_its_micro_batches_counts_in_the_same_step(tmp_path):
    data = TensorDataset(torch.randn(32, 10), torch.randn(32, 1))
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = lockstep.Loop(model, optimizer, data, global_batch=8, epochs=1, run_dir=tmp_path, **QUIET)
    for step in loop:
        optimizer.param_groups[0]["lr"] = 0.0 if step.number == 2 else 0.1
        before = copy.deepcopy(loop.model.state_dict())
        for inputs, targets in step:
            step.backward((loop.model(inputs) - targets).square().mean())
        changed = any(not torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
        assert changed == (step.number != 2), step.number
    loop.close()


def evaluated():
    from torchmetrics import MeanSquaredError

    with runs.shared_folder() as folder:
        task = own_tasks.Masked(length=24)
        loop = loop_of(task, folder, steps=1)
        inputs, targets, _ = own_tasks.masked_data(37, seed=1)
        masked_body(loop)
        value = loop.evaluate(TensorDataset(inputs, targets), MeanSquaredError())
        by_name = loop.evaluate(DataLoader(TensorDataset(inputs, targets), 4), {"mse": MeanSquaredError()})
        with torch.no_grad():
            expected = float((loop.model(inputs) - targets).square().mean())
        was_training = loop.model.training
        loop.close()
        return value, by_name, expected, was_training


def test_an_evaluation_counts_each_sample_once_on_any_number_of_ranks():
    for world in (1, 2, 3):
        for value, by_name, expected, _ in run_ranks(world, evaluated):
            assert value == pytest.approx(expected, rel=1e-6), world
            assert by_name == {"mse": pytest.approx(expected, rel=1e-6)}, world


def test_the_saved_file_is_loaded_by_plain_torch(tmp_path):
    loop = loop_of(own_tasks.Masked(), tmp_path / "run", steps=2)
    masked_body(loop)
    loop.save(tmp_path / "new" / "model.pt")
    loop.close()
    model = own_tasks.Masked().model()
    model.load_state_dict(torch.load(tmp_path / "new" / "model.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loop.model.parameters(), strict=True))


# ---- misuse


def test_a_rank_that_leaves_alone_is_named():
    # Rank 0 waits in a collective: it raises the error of rank 1, or its process ends.
    waiting, left = ranks._ranks.run(2, left_by_rank_1, timeout_s=HANG_S)
    assert left.startswith("for step in loop: rank 1 left its loop after step 3, and other ranks did not: rank 0"), left
    assert isinstance(waiting, WorkerEnded) or "rank 1 left its loop" in waiting, waiting


def left_by_rank_1():
    user_exit._LEAVE_S = 2.0
    with runs.shared_folder() as folder:
        loop = loop_of(own_tasks.Masked(), folder)
        try:
            masked_body(loop, stop=3 if os.environ["RANK"] == "1" else None)
            loop.close()
        except RankError as error:
            return str(user_exit.fail_open(error))
        return "none"


def body_without_backward(loop):
    for step in loop:
        for _ in step:
            pass


def body_with_two_passes(loop):
    for step in loop:
        for inputs, targets, _ in step:
            for _ in range(2):
                step.backward((loop.model(inputs) - targets).square().mean())


def body_that_leaves_the_step(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean())
            break


def body_with_a_vector(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square())


def body_with_a_constant(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean().detach())


def body_with_negative_units(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean(), units=-1)


def body_that_clears_first(loop):
    for step in loop:
        for inputs, targets, _ in step:
            loop._optimizer.zero_grad()
            step.backward((loop.model(inputs) - targets).square().mean())


def body_that_clears_last(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean())
            loop._optimizer.zero_grad(set_to_none=False)


def body_that_clips(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean())
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)


def body_that_updates(loop):
    for step in loop:
        for inputs, targets, _ in step:
            step.backward((loop.model(inputs) - targets).square().mean())
            loop._optimizer.step()


def test_a_body_that_breaks_a_rule_is_told_which(tmp_path):
    cases = {
        body_without_backward: "micro-batch 1 of 2 had no backward pass",
        body_with_two_passes: "called twice for a micro-batch",
        body_that_leaves_the_step: "only 1 of 2 were read",
        body_with_a_vector: "the loss is a tensor of shape (12, 5)",
        body_with_a_constant: "the loss depends on no trainable parameter",
        body_with_negative_units: "units=-1",
        body_that_clears_first: "cleared or changed the gradients",
        body_that_clears_last: "cleared or changed the gradients",
        body_that_clips: "cleared or changed the gradients",
        body_that_updates: "called optimizer.step()",
    }
    for number, (body, text) in enumerate(cases.items()):
        loop = loop_of(own_tasks.Masked(), tmp_path / str(number), micro_batch=12)
        with pytest.raises(UsageError) as caught:
            body(loop)
        assert text in str(caught.value), body.__name__
        assert "step 1" in str(caught.value), body.__name__
        user_exit.fail_open(caught.value)


def test_gradients_from_before_the_step_do_not_count(tmp_path):
    weights = []
    for stale in (False, True):
        loop = loop_of(own_tasks.Masked(), tmp_path / str(stale), steps=3, units=own_tasks.Masked().weight)
        for step in loop:
            if stale:
                sum(parameter.sum() for parameter in loop.model.parameters()).backward()
            for batch in step:
                step.backward(squared(loop, batch), reduction="sum")
        weights.append(copy.deepcopy(loop.model.state_dict()))
        loop.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_what_cannot_be_kept_is_an_error(tmp_path):
    data, model = TensorDataset(torch.randn(8, 2)), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    half = torch.optim.SGD([model.weight], lr=0.1)
    cases = [
        ((model, optimizer, DataLoader(data, 2)), "SequentialSampler"),
        ((model, optimizer, DataLoader(data, sampler=SequentialSampler(data))), "SequentialSampler"),
        ((model, optimizer, DataLoader(data, 2, shuffle=True, worker_init_fn=print)), "worker_init_fn"),
        ((model, optimizer, DataLoader(data, batch_size=None, shuffle=True)), "makes its batches"),
        ((model, optimizer, Numbers()), "IterableDataset"),
        ((model, other, data), "a parameter of shape (1, 2) that the model does not have"),
        ((model, half, data), "lacks parameters of the model that require a gradient: bias"),
        ((optimizer, model, data), "the model is a SGD"),
    ]
    for number, (arguments, text) in enumerate(cases):
        with pytest.raises(UsageError) as caught:
            lockstep.Loop(*arguments, epochs=1, run_dir=tmp_path / str(number), quiet=True)
        assert text in str(caught.value), (number, str(caught.value))


def stacked(rows):
    return torch.stack([row[0] for row in rows])


def test_settings_of_a_data_loader_are_taken_over(tmp_path):
    data = TensorDataset(torch.arange(40.0)[:, None])
    weights = [1.0] * 20 + [0.0] * 20
    sampler = WeightedRandomSampler(weights, 30)
    loader = DataLoader(
        data, 6, sampler=sampler, collate_fn=lambda rows: torch.stack([row[0] for row in rows]), drop_last=True
    )
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loop = lockstep.Loop(model, optimizer, loader, epochs=1, run_dir=tmp_path, **QUIET)
    seen = []
    for step in loop:
        for batch in step:
            seen.append(batch[:, 0].tolist())
            step.backward(loop.model(batch).mean())
    loop.close()
    assert [len(batch) for batch in seen] == [6] * 5
    assert max(max(batch) for batch in seen) < 20


def test_frozen_parameters_need_not_be_in_the_optimizer(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    loop = lockstep.Loop(model, optimizer, data, global_batch=8, epochs=1, run_dir=tmp_path, **QUIET)
    for step in loop:
        for inputs, targets in step:
            step.backward((loop.model(inputs) - targets).square().mean())
    loop.close()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias"}


def test_two_loops_follow_each_other_in_one_process():
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            loop = loop_of(own_tasks.Masked(), Path(folder, str(number)), steps=2)
            masked_body(loop)
        assert len(list(Path(folder).glob("*/checkpoints/step-*"))) == 2
        loop.close()


def body_with_other_units(loop):
    for step in loop:
        for batch in step:
            step.backward(squared(loop, batch), units=1, reduction="sum")


def test_units_that_differ_from_those_that_the_loop_counts_are_an_error(tmp_path):
    task = own_tasks.Masked()
    with pytest.raises(UsageError, match=r"units=1, but Loop\(units=...\) counts") as caught:
        body_with_other_units(loop_of(task, tmp_path, units=task.weight))
    user_exit.fail_open(caught.value)


def test_a_loop_needs_a_length(tmp_path):
    data, model = TensorDataset(torch.randn(8, 2)), nn.Linear(2, 1)
    with pytest.raises(UsageError, match="the length of the training is not given"):
        lockstep.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), data, run_dir=tmp_path, quiet=True)


def own_group():
    import torch.distributed as dist

    store = dist.FileStore(os.environ["LOCKSTEP_STORE"] + "-own", 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    try:
        with pytest.raises(UsageError, match="there is a process group already"):
            loop_of(own_tasks.Masked(), "unused")
    finally:
        dist.destroy_process_group()


def test_a_script_with_its_own_process_group_is_an_error():
    run_ranks(2, own_group)


def test_keys_that_need_the_loss_or_the_rate_of_a_task_are_refused(tmp_path):
    cases = {"watch.every": 5, "parallel.tensor": 2, "schedule.name": "cosine", "schedule.warmup_steps": 3}
    cases |= {"train.eval_every_epochs": 1, "train.eval_every_steps": 5, "optim.lr": 3.0, "optim.name": "SGD"}
    cases |= {"train.stop_when": {"metric": "eval/loss", "mode": "min", "patience": 1}}
    cases |= {"checkpoint.keep_best": "min eval/loss"}
    for key, value in cases.items():
        with pytest.raises(UsageError, match="a Loop cannot use this key") as caught:
            loop_of(own_tasks.Masked(), tmp_path, config={key: value})
        assert key.partition(".")[0] in str(caught.value), key
        assert not any(tmp_path.iterdir()), key


# ---- by epochs, and the best weights


def by_epochs(folder, stop=None):
    """What a body by epochs sees: (epoch, number of its steps here, its state); and the last weights."""
    loop = loop_of(own_tasks.Masked(length=40), folder, steps=10, global_batch=10)
    seen = []
    for epoch, steps in loop.epochs():
        numbers = []
        for step in steps:
            for batch in step:
                step.backward(squared(loop, batch), units=batch[2].sum(), reduction="sum")
            numbers.append(step.number)
            if step.number == stop:
                break
        loop.state["epochs"] = [*loop.state.get("epochs", []), epoch]
        seen.append((epoch, numbers))
        if step.number == stop:
            break
    weights = copy.deepcopy(loop.model.state_dict())
    loop.close()
    return seen, loop.state["epochs"], weights


def test_the_body_of_an_epoch_follows_its_last_step_and_is_saved_with_it(tmp_path):
    seen, epochs, whole = by_epochs(tmp_path / "whole")
    assert (seen, epochs) == ([(0, [1, 2, 3, 4]), (1, [5, 6, 7, 8]), (2, [9, 10])], [0, 1, 2])
    for stop, done, rest in ((4, [0], [(1, [5, 6, 7, 8]), (2, [9, 10])]), (6, [0, 1], [(1, [7, 8]), (2, [9, 10])])):
        folder = tmp_path / str(stop)
        assert by_epochs(folder, stop)[1] == done
        seen, epochs, weights = by_epochs(folder)
        assert (seen, epochs) == (rest, done + [epoch for epoch, _ in rest])
        assert all(torch.equal(value, weights[name]) for name, value in whole.items())


def test_an_epoch_that_is_left_before_its_end_is_an_error(tmp_path):
    loop = loop_of(own_tasks.Masked(length=40), tmp_path, steps=10, global_batch=10)

    def body():
        for _, steps in loop.epochs():
            for step in steps:
                for batch in step:
                    step.backward(squared(loop, batch))
                break

    with pytest.raises(UsageError, match="the script left epoch 0 after step 1, and began another"):
        body()


def saved_if_best(folder, values):
    """Whether the file was written for each value, over restarts of the run."""
    written = []
    for value in values:
        loop = loop_of(own_tasks.Masked(), folder / "run", steps=9)
        for step in loop:
            for batch in step:
                step.backward(squared(loop, batch))
            written.append(loop.save(folder / "best.pt", if_best=value))
            break
        loop.close()
    return written


def test_a_file_of_the_best_weights_is_written_only_for_a_better_value(tmp_path):
    assert saved_if_best(tmp_path, [-3.0, -4.0, float("nan"), -3.0, 0.5, 0.4]) == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert set(torch.load(tmp_path / "best.pt")) == set(own_tasks.Masked().model().state_dict())


def test_a_part_of_the_model_can_be_saved_by_itself(tmp_path):
    loop = loop_of(own_tasks.Masked(), tmp_path / "run", steps=1)
    masked_body(loop)
    part = next(module for module in loop.model.modules() if isinstance(module, nn.Linear))
    loop.save(tmp_path / "part.pt", part)
    loop.close()
    saved = torch.load(tmp_path / "part.pt")
    assert saved.keys() == {"weight", "bias"}
    assert torch.equal(saved["weight"], part.weight)


def test_a_resumed_run_that_asks_for_fewer_epochs_says_so(tmp_path, capsys):
    def train(epochs):
        model = nn.Linear(4, 1)
        data, optimizer = (torch.ones(16, 4),), torch.optim.SGD(model.parameters(), 0.1)
        given = {
            "global_batch": 4,
            "run_dir": tmp_path / "run",
            "config": {"log.writers": ["text_log"], "device": "cpu"},
        }
        loop = lockstep.Loop(model, optimizer, data, epochs=epochs, **given)
        for step in loop:
            for (batch,) in step:
                step.backward(loop.model(batch).square().mean())
        loop.close()
        return capsys.readouterr().out

    assert "steps 1 to 12, " in train(3)
    again, fewer = train(3), train(2)
    for said in (again, fewer):
        assert "global batch 4, no step is left, " in said
    assert "is complete at step 12: raise epochs to continue, or start again with Loop(fresh=True)" in again
    assert "is at step 12, and epochs asks for 8 steps: raise epochs to continue" in fewer


@pytest.mark.parametrize(
    ("quiet", "is_in_log", "says"), [(False, True, ""), (True, True, "x; "), (False, False, "x; ")]
)
def test_the_end_by_a_signal_is_said_once(quiet, is_in_log, says, capsys):
    stopped = Preempted("x")
    stopped.is_in_log = is_in_log
    end = user_exit.Exit(lambda: None, quiet=quiet)
    with pytest.raises(SystemExit), end.guarded():
        raise stopped
    assert capsys.readouterr().err == f"{says}the same command resumes from there\n"
