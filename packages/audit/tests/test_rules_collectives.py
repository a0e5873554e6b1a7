"""Rules on collectives and hangs."""

import pytest

from lockstep_audit.rules import skips
from packages.audit.tests.made_events import Script, at


def called(*calls, script=None):
    """Calls in their order: a function of the rank gives op, shape and line."""
    script = script or Script()
    for sequence, call in enumerate(calls):
        for rank in range(script.world):
            op, shape, line = call(rank)
            script.add(
                "collective", rank, at=at(line), op=op, group="0", shape=shape, dtype="torch.float32", sequence=sequence
            )
    return script


def test_calls_that_do_not_match_are_named_with_both_lines():
    script = called(
        lambda rank: ("all_reduce", [4], 20), lambda rank: ("barrier", [], 21) if rank else ("all_reduce", [4], 22)
    )
    (finding,) = script.found("LS501")
    assert (
        "call 1 in group 0: all_reduce [4] torch.float32 at train.py:22 on rank 0, barrier at train.py:21"
        in finding.evidence
    )
    assert finding.where.line in (21, 22)
    shapes = called(lambda rank: ("all_reduce", [4 + rank], 20))
    assert shapes.found("LS501")[0].cause is None
    recorded = [
        {
            "group": "0",
            "sequence": 7,
            "name": "gloo:all_reduce",
            "sizes": [[4]],
            "dtypes": ["Float"],
            "state": "scheduled",
        }
    ]
    other = [recorded[0] | {"sizes": [[5]]}]
    hung = waiting(lambda rank: 30, collectives=lambda rank: other if rank else recorded)
    assert "collective 7 of group 0" in hung.found("LS501")[0].evidence


@pytest.mark.parametrize(
    "script",
    [
        called(lambda rank: ("all_reduce", [4], 20), lambda rank: ("barrier", [], 21)),
        called(lambda rank: ("all_reduce", [4], 20 + rank)),  # `if rank == 0: ... else: ...` with the same call in both
        called(lambda rank: ("gather", [4 + rank], 20)),
        called(lambda rank: ("send" if rank else "recv", [4], 20)),
    ],
    ids=["equal", "two branches", "uneven gather", "pipeline"],
)
def test_calls_that_match_are_right(script):
    assert script.errors() == set()


def waiting(line, world=2, script=None, **keys):
    keys = {"since_s": 60.0, "blocked_in": "torch.distributed.barrier", "moves": False} | keys
    return (script or Script(world)).add("stuck", at=lambda rank: at(line(rank)), stacks={}, **keys)


def test_ranks_that_wait_in_different_lines_are_named():
    script = waiting(lambda rank: 40 if rank == 0 else 30, world=3)
    (finding,) = script.found("LS502")
    assert finding.where.line == 40
    assert "train.py:30 (torch.distributed.barrier) on ranks 1, 2" in finding.evidence
    assert "rank 0 reached train.py:40, and the others did not" in finding.cause
    assert script.errors() == {"LS502"}


def test_the_flight_recorder_says_who_did_not_come():
    def entries(rank):
        count = 3 if rank else 5
        return [
            {
                "group": "0",
                "sequence": count,
                "name": "gloo:all_reduce",
                "sizes": [],
                "dtypes": [],
                "state": "scheduled",
            }
        ]

    cause = waiting(lambda rank: 30 + rank, collectives=entries).found("LS502")[0].cause
    assert "rank 1 made only 3 collectives, and rank 0 made 5" in cause


def test_ranks_that_are_stuck_in_one_line_have_no_known_cause():
    (finding,) = waiting(lambda rank: 30).found("LS504")
    assert finding.cause is None
    script = waiting(lambda rank: 30)
    script.events = [event | ({"world_size": 3} if event["kind"] == "start" else {}) for event in script.events]
    assert script.found("LS504")[0].cause == "rank 2 never began"


def test_a_rank_that_was_slow_and_went_on_is_not_stuck():
    script = waiting(lambda rank: 30 + rank).optimizer().step().exit()
    assert script.errors() == set()
    rank_0_evaluates = Script().add("stuck", 1, at=at(30), stacks={}).add("loader", 0, loader=0).exit()
    assert rank_0_evaluates.errors() == set()


def test_a_rank_that_left_while_others_wait_is_named():
    script = Script().optimizer().step().exit(0)
    script.step(rank=1).add("stuck", 1, at=at(31), stacks={}, since_s=60)
    (finding,) = script.found("LS503")
    assert "rank 0 ended without an error after 1 step, while step 2 waits at train.py:31 on rank 1" in finding.evidence
    assert "fewer steps" in finding.cause
    lost = Script().optimizer().step().exit(0).step(rank=1)
    lost.exit(1, code=1, error={"type": "RuntimeError", "message": "Connection closed by peer [::1]", "at": at(31)})
    assert lost.found("LS503")


def test_scripts_that_fail_or_end_are_not_left():
    assert Script().optimizer().step().exit().errors() == set()
    failed = Script().optimizer().step().exit(0, code=1, error={"type": "ValueError", "message": "no file"})
    failed.exit(1, code=1, error={"type": "RuntimeError", "message": "Connection reset", "at": at(31)})
    assert failed.errors() == set()  # rank 0 has told its own error
    both = Script().exit(code=1, error={"type": "ValueError", "message": "no file"})
    assert both.errors() == set()


def test_the_end_of_a_loader_counts_backward_passes_and_does_not_list_them():
    script = waiting(
        lambda rank: 40 if rank == 0 else 30, script=Script().add("loader_end", loader=0, epoch=0, backwards=8)
    )
    assert script.found("LS502")[0].where.line == 40


def test_collectives_with_different_roots_do_not_match():
    def broadcast(root):
        keys = {"op": "broadcast", "dtype": "float32", "shape": [4], "group": "0", "sequence": 0}
        return Script().add("collective", at=at(44), root=root, **keys).found("LS501")

    assert "broadcast [4] float32 of rank 0 at train.py:44 on rank 0" in broadcast(lambda rank: rank)[0].evidence
    assert broadcast(0) == []


SKIPS = """\
def main():
    for batch in loader:
        if step < start:
            continue
        loss = model(batch)
        if not torch.isfinite(loss):
            continue
        loss.backward()
"""


def left_out(path, skipped=(3,), size=8, end=8, drawn=None):
    """Rank 1 leaves out batches of its loop, and waits behind it; rank 0 waits in its last backward pass."""
    place = lambda line: [str(path), line, "main"]  # noqa: E731
    script = Script().optimizer()
    for rank in range(2):
        script.add(
            "loader", rank, loader=0, epoch=0, batches=drawn(rank) if drawn else size, at=place(2), made_at=at(9)
        )
        given = []
        for batch in range(size - (rank == 0)):
            given.append({"loader": 0, "batch": batch, "samples": 4})
            if rank and batch in skipped:
                continue
            passes = [{"at": place(8), "synced": True}]
            script.step(rank, backwards=0, micro_batches=given)
            script.events[-1]["backwards"] = passes
            given = []
    done = {"batches": end, "backwards": size - len(skipped), "is_complete": end == size}
    script.add("loader_end", 1, loader=0, epoch=0, **done)
    return script.add("stuck", at=lambda rank: place(12 if rank else 8), stacks={}, since_s=60.0, blocked_in="backward")


def test_a_batch_that_one_rank_left_out_is_named_at_its_condition(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SKIPS)
    (finding,) = left_out(path).found("LS502")
    assert finding.where.line == 6
    assert "rank 1 skipped batch 3 of epoch 0" in finding.cause
    (finding,) = left_out(path, skipped=(7,)).found("LS502")  # no step follows
    assert finding.where.line == 6
    assert "rank 1 skipped batch 7 of epoch 0" in finding.cause
    assert left_out(tmp_path / "gone.py").found("LS502")[0].where.line == 2


def test_ranks_that_wait_after_loops_of_other_lengths_left_no_batch_out(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SKIPS)
    for script in (left_out(path, skipped=()), left_out(path, drawn=lambda rank: 8 - rank)):
        (finding,) = script.found("LS502")
        assert finding.where.line != 6
        assert "skipped" not in finding.cause


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("for x in data:\n    if len(x) == 0:\n        continue\n    loss(x).backward()\n", 2),
        ("for x in data:\n    try:\n        loss(x).backward()\n    except RuntimeError:\n        continue\n", 4),
        ("for x in data:\n    value = loss(x)\n    if value.isfinite():\n        value.backward()\n", 3),
        ("for x in data:\n    loss(x)\n    loss(x).backward()\n    if isnan(x):\n        continue\n", None),
    ],
)
def test_what_leaves_out_a_batch_is_found_in_the_text(text, line, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(text)
    backward = next(row for row, each in enumerate(text.splitlines(), 1) if "backward()" in each)
    found = skips.left_out([str(path), 1, ""], [str(path), backward, ""])
    assert [each[2] for each in found[:1]] == ([line] if line else [])


def test_results_of_collectives_that_nothing_reads_are_named(tmp_path):
    def found(text, op="broadcast_object_list"):
        path = tmp_path / f"{abs(hash(text))}.py"
        path.write_text(text)
        row = next(number for number, line in enumerate(text.splitlines(), 1) if "dist." in line or "acc" in line)
        script = Script().add("collective", at=[str(path), row, "main"], op=op, group="0", sequence=0)
        return [finding.where.line for finding in script.found("LS507")]

    wrong = (
        "dist.broadcast_object_list([order], src=0)\nfor x in order: f(x)\n",
        "box = [order]\ndist.broadcast_object_list(box)\nfor x in order: f(x)\n",
        "t = torch.tensor(total)\ndist.all_reduce(t)\nprint(total / n)\n",
        "dist.all_reduce(loss.detach().clone())\nprint(loss)\n",
        "accelerator.reduce(total)\n",
    )
    assert [found(text) for text in wrong] == [[1], [2], [2], [1], [1]]
    right = (
        "box = [order]\ndist.broadcast_object_list(box)\norder = box[0]\n",
        "t = torch.tensor(total)\ndist.all_reduce(t)\nprint(t)\n",
        "dist.all_reduce(torch.zeros(1))\n",
        "dist.all_reduce(torch.tensor(1.0))\n",
        "dist.all_reduce(total)\n",
        "t = loss.clone()\ndist.all_reduce(t)\n",
        "t = loss.clone()\ndist.all_reduce(t)\nt /= 2\nprint(loss)\n",
        "total = accelerator.reduce(total)\n",
        "handle = dist.all_reduce(torch.tensor(x), async_op=True)\n",
        "seed = torch.tensor(s)\nself.seed = seed\ndist.broadcast(seed, 0)\n",
    )
    assert [found(text) for text in right] == [[]] * len(right)
