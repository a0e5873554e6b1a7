"""Rules on scripts that a timeout or a signal ends, and on what ranks do apart."""

import json

import pytest

from lockstep_audit import events
from lockstep_audit.events import EventHistory
from lockstep_audit.report.outcome import outcome
from packages.audit.tests.made_events import FILE, Script, at, dealt, in_batches, parts

TIMEOUT = "Timed out waiting 20000ms for recv operation to complete"
DUMP = """Fatal Python error: Aborted

Thread 0x00007f517eee56c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f517f9c3b80 (most recent call first):
  File "/x/site-packages/torch/distributed/tensor/_api.py", line 554 in full_tensor
  File "/home/somebody/train.py", line 61 in save
  File "/home/somebody/train.py", line 40 in main
"""


def lost(line, function, message=TIMEOUT):
    stack = [["/x/site-packages/torch/distributed/distributed_c10d.py", 5, "barrier"], [FILE, line, function]]
    error = {"type": "RuntimeError", "message": message, "at": stack[-1], "stack": [*stack, [FILE, 40, "main"]]}
    return {"code": 1, "error": error}


def test_a_timeout_of_collectives_says_where_the_ranks_were():
    script = Script().optimizer().step()
    script.exit(0, **lost(33, "train")).add("died", 1, at=at(61), stacks={"MainThread": [at(61)]}, aborted=False)
    (finding,) = script.found("LS502")
    assert "train.py:33 (torch.distributed.distributed_c10d.barrier) on rank 0" in finding.evidence
    assert script.errors() == {"LS502"}
    alike = Script().optimizer().step().exit(**lost(33, "train"))
    assert alike.errors() == set()  # a slow network
    closed = Script().optimizer().step().exit(0, **lost(33, "train", "Connection closed by peer"))
    assert closed.add("died", 1, at=at(61), stacks={"MainThread": []}).errors() == set()  # somebody ended it


def test_the_stacks_of_a_signal_are_an_event(tmp_path):
    script = Script().optimizer().step()
    for rank in range(2):
        told = [json.dumps(event) for event in script.events if event["rank"] == rank]
        dump = DUMP if rank == 0 else DUMP.partition("\n\n")[2].replace("line 61 in save", "line 30 in main")
        events.path_of(tmp_path, rank).write_text("\n".join(told) + "\n" + dump)
    read = EventHistory(events.read(tmp_path))
    died = list(read.of("died"))
    assert [event["at"][1] for event in died] == [61, 30]
    assert [(event["aborted"], event["blocked_in"]) for event in died] == [
        (True, "torch.distributed.tensor._api.full_tensor"),
        (False, "torch.distributed.tensor._api.full_tensor"),
    ]
    (finding,) = outcome(read).of("error")
    assert (finding.rule, finding.where.line) == ("LS502", 61)


def test_a_wait_in_a_function_of_one_rank_is_named_where_it_waits():
    script = Script().optimizer().step().exit(0)
    script.add("stuck", 1, at=[FILE, 61, "evaluate"], stacks={}, since_s=60)
    (finding,) = script.found("LS503")
    assert (finding.where.line, "rank 0 never did" in finding.cause) == (61, True)


def evaluated(exchange=False, **keys):
    script = Script().optimizer().epoch(parts(), distributed=dealt())
    told = {"train": False, "digest": lambda rank, batch: f"{rank}{batch}", "sampler_kind": "SequentialSampler"}
    script.epoch(parts(), number=1, **(told | {"distributed": dealt(), "dataset_size": 16} | keys))
    return script.add("collective", at=at(50), op="all_reduce") if exchange else script


def test_an_evaluation_of_parts_that_nobody_exchanges_is_a_warning():
    (finding,) = evaluated().found("LS605")
    assert (finding.where.line, "8 on ranks 0, 1" in finding.evidence) == (20, True)
    assert evaluated(exchange=True).found("LS605") == []
    assert evaluated(distributed=None, shuffles=False).found("LS605") == []  # each rank evaluates all


def test_an_evaluation_that_leaves_samples_out_is_a_warning():
    assert evaluated(drop_last=True, batch_size=2, dataset_size=19).found("LS601")[0].where.line == 10
    assert evaluated(drop_last=True, batch_size=2).found("LS601") == []
    rest = evaluated(drop_last=True, batch_size=2, dataset_size=19)
    keys = {"subset": "of the last", "train": False}
    assert rest.epoch(lambda rank: [[16, 17, 18]], number=2, dataset_size=3, **keys).found("LS601") == []


def test_inputs_that_differ_by_rank_are_a_warning_and_other_contents_an_error():
    def probed(label, value=lambda rank, index: f"{rank}{index}"):
        script = Script().optimizer().epoch(parts(), distributed=dealt(), dataset_size=16)
        samples = [{str(index): [value(rank, index), [label(rank)]] for index in range(4)} for rank in range(2)]
        return script.add("probe", at=at(10), loader=0, dataset_size=16, samples=lambda rank: samples[rank])

    assert probed(lambda rank: 3).ids() == {"LS112"}
    assert probed(lambda rank: 3, lambda rank, index: None).ids() == set()  # augmented anew
    assert "LS112" not in probed(lambda rank: 3 + rank).ids()


PREPARED = """class Module(pl.LightningDataModule):
    def __init__(self): self.mean = self.unused = 0
    def prepare_data(self):
        self.unused = 3
        self.mean = 4
    def setup(self, stage):
        mean = self.mean
        self.data = TensorDataset(x - mean)
"""
ON_ONE_RANK = """x, mean = load(), 0
if accelerator.is_main_process:
    shown = 3
    mean = x.mean()
scaled = x - mean
dataset = TensorDataset(scaled)
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "row", "line"),
    [
        (PREPARED, "", "", 8, 5),
        (PREPARED, "mean = self.mean", "mean = self.mean = 4", 8, 8),
        (PREPARED, "pl.LightningDataModule", "Reader", 8, 8),
        (ON_ONE_RANK, "", "", 6, 4),
        (ON_ONE_RANK, "scaled =", "mean = broadcast(mean); scaled =", 6, 6),
        (ON_ONE_RANK, "scaled = x - mean", "scaled = x", 6, 6),
        (ON_ONE_RANK, "scaled =", "else: mean = 3\nscaled =", 7, 7),
    ],
)
def test_what_one_rank_alone_sets_is_the_line_of_inputs_that_differ(tmp_path, text, old, new, row, line):
    (tmp_path / "script.py").write_text(text.replace(old, new) if old else text)
    made = [str(tmp_path / "script.py"), row, "main"]
    script = Script().optimizer().epoch(parts(), distributed=dealt(), dataset_size=16, dataset_at=made)
    samples = [{str(index): [f"{rank}{index}", [3]] for index in range(4)} for rank in range(2)]
    script.add("probe", at=at(10), loader=0, dataset_size=16, samples=lambda rank: samples[rank])
    assert [found.where.line for found in script.found("LS112")] == [line]


def test_experts_of_each_rank_are_right_and_weights_of_unequal_beginnings_are_not():
    def hand(gradients):
        script = Script(how=None).add("hand_reduce", at=at(23), op="SUM", parameters=1, divided=True)
        script.optimizer(initial=lambda rank: {"weight": str(rank), "bias": "b"})
        return script.step(digest=str, gradients=gradients)

    assert hand(lambda rank: {"weight": str(rank), "bias": "b"}).errors() == set()
    assert hand(lambda rank: {"weight": "same", "bias": "b"}).errors() == {"LS201"}


def test_a_wrapper_whose_group_is_one_rank_is_named():
    script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", ranks=lambda rank: [rank])
    script.optimizer().epoch(lambda rank: in_batches(list(range(rank, 16, 2)), 2), train=False, distributed=dealt())
    for event in script.events:
        event |= {"backwards": 4} if event["kind"] == "loader_end" else {}
    assert script.step(digest=str).found("LS207")[0].where.line == 5


def test_losses_that_are_divided_by_the_global_batch_or_by_unequal_counts_are_a_warning():
    def divided(divisor, *inner, summed=8):
        batches = [{"loader": 0, "batch": 0, "samples": 8}]
        script = Script().optimizer().step(micro_batches=batches).step(micro_batches=batches)
        for event in script.events:
            for each in event.get("backwards") or ():
                each |= {"divisor": divisor(event["rank"]), "ops": ["DivBackward0", *(inner or ["SumBackward0"])]}
                each["sum_of"] = summed
        return script

    assert divided(lambda rank: 16.0).found("LS211")[0].where.line == 25
    assert (
        divided(lambda rank: 16.0, summed=24).ids() == set()
    )  # a mean over 16 of them, as many as all samples by chance
    by_ranks = Script().add("framework", name="accelerate").optimizer().step()
    for each in (each for event in by_ranks.events for each in event.get("backwards") or ()):
        each |= {"divisor": 2.0, "by_ranks": True, "ops": ["DivBackward0", "MeanBackward0"]}
    assert by_ranks.ids() == set()  # Accelerate divides by the micro-batches, of which there are as many as ranks
    for each in (each for event in by_ranks.events for each in event.get("backwards") or ()):
        each["divided_at"] = at(24)
    assert by_ranks.ids() == {"LS211"}
    assert divided(lambda rank: 8.0).ids() == divided(lambda rank: 16.0, "MulBackward0").ids() == set()
    focal = ("SumBackward0", "MulBackward0")  # what is summed may be multiplied, by a mask or a weight
    assert divided(lambda rank: 16.0, *focal).found("LS211")[0].where.line == 25
    assert divided(lambda rank: 40.0 + 60 * rank).ids() == {"LS403"}
    twice = Script(how=None).add("hand_reduce", at=at(27), op="SUM", parameters=2, divided=False, factor=0.25)
    assert twice.optimizer().step().ids() == {"LS211"}


def test_means_of_roots_are_a_warning():
    told = {"op": "all_reduce", "dtype": "float32", "shape": [], "group": "0", "sequence": 0, "reduce_op": "SUM"}
    script = Script().add("collective", at=at(44), value=lambda rank: 1.5 + rank, result_of="sqrt", **told)
    assert script.found("LS604")[0].where.line == 44
    assert Script().add("collective", at=at(44), value=1.5, result_of="sqrt", **told).found("LS604") == []


def test_a_rank_that_never_steps_is_named():
    script = Script().optimizer(rank=0).step(0).exit(0).exit(1, backwards_left=6)
    (finding,) = script.found("LS206")
    assert (finding.where.line, "rank 1 made 6 backward passes and no step" in finding.evidence) == (30, True)
    assert Script().optimizer(rank=0).step(0).exit().errors() == set()  # rank 1 trains nothing


def test_rates_that_the_script_sets_are_named_where_it_sets_them(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("for group in optimizer.param_groups:\n    group['lr'] *= 0.5\nstep()\n")
    script = Script().optimizer().step(hyperparameters=[{"lr": 0.1}])
    script.step(hyperparameters=lambda rank: [{"lr": 0.1 + rank}])
    script.events = [event | {"at": [str(path), 3, "main"]} for event in script.events]
    (finding,) = script.found("LS301")
    assert finding.where.line == 2
    script.add("scheduler", 0, at=at(59), scheduler=0, per_step=6)
    assert script.found("LS301")[0].where.line == 59


def test_a_loss_without_some_parameters_is_named_where_the_model_was_wrapped():
    script = Script().optimizer().step(digest=str, synced=True)
    message = "Expected to have finished reduction in the prior iteration: `find_unused_parameters=True`"
    script.exit(code=1, error={"type": "RuntimeError", "message": message, "at": at(25)})
    (finding,) = script.found("LS201")
    assert (finding.where.line, "does not use some parameters" in finding.cause) == (5, True)
