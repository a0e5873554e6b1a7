"""Rules on the weights that ranks evaluate with."""

from packages.audit.tests.made_events import FILE, Script, at, dealt


def evaluated(
    now=str, changed=None, dealt_to=2, exchange="all_reduce", ranks=None, before=str, after=None, script=None, load=None
):
    """An evaluation after a step, of weights that `now` tells; `before`: of the step, `after`: of a later step."""
    script = (script or Script()).optimizer().step(digest=before)
    if load:
        script.add("load", 0, path=load, at=at(30))
    for rank in range(2) if ranks is None else ranks:
        loop = {"loader": 1, "epoch": 0}
        script.add("loader", rank, at=at(36), made_at=at(18), dataset_size=16, distributed=dealt(dealt_to), **loop)
        told = {"digests": lambda rank: {"weight": now(rank)}, "path": [at(39), [FILE, 50, "run"]]}
        script.add("weights", rank, at=at(39), model=0, changed=changed, **told)
        script.add("collective", rank, op=exchange, at=at(41), shape=[2], group="0", sequence=0)
        script.add("loader_end", rank, backwards=0, forwards_eval=4, is_complete=True, batches=4, samples=8, **loop)
    return (script.step(digest=after) if after else script).found("LS609")


def same(rank):
    return "same"


def loaded(rank):
    return (
        {"at": [[FILE, 12, "swap"], [FILE, 38, "main"], [FILE, 50, "run"]], "before": {"weight": "1"}}
        if not rank
        else None
    )


def test_weights_that_one_rank_swapped_before_a_shared_evaluation_are_an_error():
    (finding,) = evaluated(changed=loaded, before=same)
    assert (finding.where.line, finding.step, finding.ranks) == (38, 1, (0, 1))
    assert "1 of 1 parameters differ between ranks 0, 1 (weight)" in finding.evidence
    assert "load_state_dict at train.py:12 was called on rank 0 only" in finding.cause
    (finding,) = evaluated(before=same, after="later")  # nobody saw what changed them
    assert (finding.where.line, "something changed the weights" in finding.cause) == (36, True)


def test_evaluations_that_are_not_shared_and_replicas_that_had_parted_are_not_accused():
    assert evaluated(now=same, before=same) == []
    assert evaluated(before=same, ranks=[0]) == []  # rank 0 evaluates alone
    assert evaluated(before=same, dealt_to=1) == []  # each rank evaluates another checkpoint on the whole data
    assert evaluated(before=same, exchange="barrier") == []
    assert evaluated(before=str, after="later") == []  # LS201
    averaged = Script().add("hand_average", model=0, collective="all_reduce", op="SUM", elements=9, at=at(31))
    assert evaluated(before=same, script=averaged) == []


def test_ranks_that_find_their_files_in_other_folders_are_told():
    script = Script().add("save", path=lambda rank: f"/runs/{rank}/last/a.pt", at=at(30), how="torch.save")
    (finding,) = evaluated(changed=loaded, before=same, script=script, load="/runs/0/last/a.pt")
    assert "load_state_dict of a.pt" in finding.cause
    assert "0/last on rank 0, 1/last on rank 1" in finding.cause
    assert "broadcast_object_list" in finding.remedy


def test_weights_loaded_after_the_last_step_tell_nothing_of_the_training():
    def ended(**keys):
        script = Script().optimizer().step().add("state", what="model", id=0, at=at(60), **keys)
        return script.exit(parameters=lambda rank: {"0": {"weight": str(rank), "bias": "b"}}).found("LS201")

    assert ended(model=0) == []
    assert len(ended()) == 1
