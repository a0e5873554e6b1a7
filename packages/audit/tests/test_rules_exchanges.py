"""Rules on what ranks exchange, and on what only some of them change: counts, scores, padding, copies, joins."""

from packages.audit.tests.made_events import Script, at, dealt, parts


def divided(*divisors, factors=(), ranks=None, of=0, **keys):
    script = Script().optimizer()
    for divisor in divisors:
        for rank in range(2):
            script.step(rank, **keys)
            term = {"divisor": divisor, "factors": factors, "ranks": ranks, "of": of, "is_once": True, "at": at(24)}
            script.events[-1]["backwards"][0] |= {"divisor": 1.0, "ops": ["AddBackward0"], "terms": [term]}
    return script.found("LS211")


def test_a_sum_that_is_divided_by_a_count_of_all_ranks_is_an_error():
    (finding,) = divided(93.5, 80.0)
    assert (finding.where.line, "divided by 93.5, the sum of the counts" in finding.evidence) == (24, True)
    assert all((divided(93.5, 80.0, ranks=[0, 1]), divided(80.0, 80.0, of=70), divided(93.5, 80.0, factors=(0.5,))))
    assert divided(93.5, 93.5) == divided(93.5, 80.0, ranks=[0]) == divided(93.5, 80.0, rescaled=2.0) == []
    assert [divided(93.5, 80.0, factors=by) for by in ((2.0,), (0.5, 2.0), (4.0, 0.5))] == [[]] * 3


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


def test_a_state_without_a_copy_that_is_restored_is_an_error():
    def restored(script=None, **keys):
        script = (script or Script()).optimizer().step()
        return script.add("state", at=at(60), what="model", id=0, **keys).found("LS709")

    (finding,) = restored(taken=[at(44), 8])
    assert (finding.where.line, "8 steps of optimizers" in finding.evidence) == (44, True)
    assert "another load_state_dict" in restored(taken=[at(44), 0])[0].evidence
    average = Script().add("hand_average", at=at(31), model=0, collective="all_reduce", op="SUM", elements=9)
    assert restored() == restored(average, taken=[at(44), 8]) == []


def test_a_copy_with_the_statistics_of_a_new_layer_is_an_error():
    def left(initial):
        copy = {"class": "Net", "at": at(50), "digest": "1", "made_from": [at(12), at(9)], "initial": initial}
        return Script().optimizer().step().exit(copies={"0": copy}).found("LS612")

    (finding,) = left(["1", "4"])
    assert (finding.where.line, "2 normalizations have" in finding.evidence) == (12, True)
    assert left(None) == []


def test_means_of_quotients_for_each_class_are_a_warning():
    by = [{0: [9.0, 4.0], 1: [9.0, 5.0]}, {0: [9.0, 4.0], 1: [9.0, 4.0]}]
    told = {"op": "all_reduce", "dtype": "float32", "shape": [], "sequence": 0, "reduce_op": "SUM", "value": float}
    found = [Script().add("collective", at=at(44), ratio_of=each.get, **told).found("LS604") for each in by]
    assert ["(9, 4) on rank 0, (9, 5) on rank 1" in one.evidence for one in found[0]] == [True]
    assert found[1] == []


def test_padding_is_known_if_the_numbers_of_samples_are_gathered():
    def evaluated(first):
        numbers = {0: [[0, 2], [4]], 1: [[1, 3], [0]]}
        script = Script().optimizer().epoch(numbers.get, train=False, distributed=dealt(), dataset_size=5)
        return script.add("collective", op="all_gather", at=at(40), given=[3], first=first).found("LS601")

    assert len(evaluated(None)) == len(evaluated(lambda rank: [1, 1, 0])) == 1
    assert evaluated({0: [0, 2, 4], 1: [1, 3, 0]}.get) == []


def test_the_draw_of_an_order_is_the_line_of_a_subset_that_differs():
    def split(digest):
        script = Script().optimizer().add("order", at=at(6), length=20, digest=digest)
        return script.epoch(parts(), distributed=dealt(), subset=str, dataset_size=16).found("LS103")[0].where.line

    assert (split(str), split("same")) == (6, 10)
