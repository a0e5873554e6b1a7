"""Rules on what ranks exchange, and on what only some of them change: counts, scores, padding, copies, joins."""

from packages.audit.tests.made_events import Script, at


def divided(*divisors, ops=("DivBackward0", "SumBackward0"), ranks=None, **keys):
    script = Script().optimizer()
    for divisor in divisors:
        for rank in range(2):
            script.step(rank, **keys)
            told = {"divisor": divisor, "ops": list(ops), "summed_to": {"at": at(22), "ranks": ranks}}
            script.events[-1]["backwards"][0] |= told | {"divided_at": at(24)}
    return script.found("LS211")


def test_a_sum_that_is_divided_by_a_count_of_all_ranks_is_an_error():
    (finding,) = divided(93.5, 80.0)
    assert (finding.where.line, "divided by 93.5, the sum of the counts" in finding.evidence) == (24, True)
    assert divided(93.5, 80.0, ranks=[0, 1]) != []
    assert divided(93.5, 93.5) == divided(93.5, 80.0, ranks=[0]) == divided(93.5, 80.0, rescaled=2.0) == []
    others = [("DivBackward0", "MulBackward0", "SumBackward0"), ("DivBackward0", "MeanBackward0")]
    others += [("MulBackward0", "DivBackward0", "SumBackward0"), ("DivBackward0", "_AllReduceBackward", "SumBackward0")]
    assert [divided(93.5, 80.0, ops=ops) for ops in others] == [[]] * 4


def scored(script=None, value=float, **keys):
    told = {"op": "all_reduce", "dtype": "float32", "shape": [], "group": "0", "sequence": 0, "reduce_op": "SUM"}
    script = (script or Script()).add("collective", at=at(44), value=0.5, **told)  # another number of this line
    return script.add("collective", at=at(44), value=value, result_of="f1_score", **(told | keys)).found("LS604")


def test_a_mean_of_scores_of_shards_is_a_warning():
    (finding,) = scored()
    assert (finding.where.line, "f1_score() of its shard" in finding.evidence) == (44, True)
    assert scored(reduce_op="MAX") == scored(value=0.7) == scored(Script(how=None)) == []
    assert scored(Script().add("hand_average", at=at(31), model=0, collective="all_reduce", op="SUM", elements=9)) == []


def test_gathered_padding_that_a_metric_counts_is_a_warning():
    script = Script().add("padding", 0, at=at(40), by="f1_score()", by_at=at(42), rows=100, own=90)
    (finding,) = script.found("LS608")
    assert (finding.where.line, "counts all 100, but ranks have 90 together" in finding.evidence) == (40, True)


def test_sums_of_copies_of_gradients_that_do_not_come_back_are_an_error():
    def copied(digest, ranks=None):
        script = Script(how=None).optimizer(owned=0).add("copy_reduce", ranks, at=at(27), optimizer=0)
        return script.step(digest=digest).found("LS507")

    assert [finding.where.line for finding in copied(str)] == [27]
    assert copied("same") == copied(str, 0) == []


def evaluated(changed=(0,), inputs=str, exchange="all_reduce"):
    """An evaluation without a loader."""
    script = Script().optimizer().step()
    load = {"at": [at(12)], "before": {"weight": "1"}}
    told = {"digests": lambda rank: {"weight": str(rank in changed)}, "path": [at(39)], "inputs": inputs}
    script.add("weights", at=at(39), model=0, changed=lambda rank: load if rank in changed else None, **told)
    return script.add("collective", op=exchange, at=at(41), shape=[2], group="0", sequence=0).found("LS609")


def test_weights_that_only_one_rank_loaded_for_an_evaluation_without_a_loader_are_an_error():
    assert [finding.where.line for finding in evaluated()] == [12]
    assert evaluated(()) == evaluated((0, 1)) == evaluated(inputs="same") == evaluated(exchange="broadcast") == []


def test_frozen_parts_that_one_rank_updates_are_a_warning():
    def taught(*writes, user=None, **call):
        script = Script().optimizer().step().add("frozen_part", user, at=at(21), model=0, names=["teacher"])
        for rank in writes:
            script.add("write", rank, at=at(33), name="teacher", digest="1")
        return (script.add("collective", at=at(34), **call) if call else script).exit().found("LS214")

    (finding,) = taught(0)
    assert (finding.where.line, "rank 0 updates it" in finding.cause) == (33, True)
    assert taught() == taught(0, 1) == taught(0, user=0) == taught(0, op="broadcast", dtype="float32") == []


def joined(first, digest=str, **keys):
    script = Script().optimizer().add("join", at=at(19))
    for epoch in range(2):
        for rank in range(2):
            told = {"loader": 0, "epoch": epoch}
            script.add("loader", rank, at=at(20), made_at=at(10), is_iterable=False, **told)
            for step in range(first[rank] if epoch == 0 else 1):
                apart = digest(rank) if epoch else str(step)
                script.step(rank)
                script.events[-1]["parameters"] = {"weight": apart}
                script.events[-1] |= keys
            script.add("loader_end", rank, backwards=1, is_complete=True, **told)
    return script.add("exit", parameters={"0": {"weight": "end"}}).found("LS201")


def test_states_of_optimizers_that_part_in_a_join_are_an_error():
    (finding,) = joined((3, 2))
    assert (finding.where.line, "3 on rank 0, 2 on rank 1 steps before" in finding.cause) == (19, True)
    assert joined((3, 2), digest=lambda rank: "same") == []


def test_buffers_are_compared_where_ranks_evaluate_together():
    def looked(line):
        script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", buffers=1).step()
        return script.add("buffers", at=lambda rank: at(line(rank)), model=0, digests=lambda rank: {"mean": str(rank)})

    assert [finding.where.line for finding in looked(lambda rank: 30).found("LS602")] == [30]
    assert looked(lambda rank: 30 + rank).found("LS602") == []  # rank 0 has evaluated alone
