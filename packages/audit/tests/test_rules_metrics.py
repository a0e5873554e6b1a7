"""Rules on means of means, metrics of one rank, orders, and files of which others read too early or too little."""

import torch

from lockstep_audit.observe import quotients
from packages.audit.tests.made_events import Script, at, dealt, parts
from packages.audit.tests.test_rules_rest import first_run, second_run


def reduced(script=None, **keys):
    told = {"op": "all_reduce", "dtype": "float32", "shape": [], "group": "0", "sequence": 0, "reduce_op": "SUM"}
    return (script or Script()).add("collective", at=at(44), **(told | keys))


def test_a_mean_of_unequal_means_is_a_warning():
    def mean(**keys):
        told = {"means": 3, "numbers": 60, "unequal": True, "weighted": 0.4, "least": 10, "most": 40}
        return reduced(
            value=0.5, mean_of=lambda rank: {n: v(rank) if callable(v) else v for n, v in (told | keys).items()}
        )

    (finding,) = mean().found("LS604")
    assert (finding.where.line, "mean of 3 means" in finding.evidence) == (44, True)
    (finding,) = mean(unequal=False, numbers=lambda rank: 30 + 10 * rank).found("LS604")
    assert "30 on rank 0, 40 on rank 1" in finding.evidence
    right = [mean(unequal=False), mean(least=20, most=20), mean(unequal=False, numbers=lambda rank: 50 + rank)]
    assert [script.found("LS604") for script in right] == [[], [], []]


def test_shares_of_unequal_numbers_of_samples_are_a_warning():
    def accuracy(samples, value):
        keys = {"train": False, "end": {"samples": samples, "forwards_eval": 8}}
        return reduced(Script().optimizer().epoch(parts(), **keys), value=value)

    (finding,) = accuracy(lambda rank: 51 - rank, lambda rank: 45 / (51 - rank)).found("LS604")
    assert "51 on rank 0, 50 on rank 1" in finding.evidence
    assert accuracy(50, 0.9).found("LS604") == []
    assert accuracy(lambda rank: 51 - rank, 0.3571).found("LS604") == []  # no share of so many samples
    assert accuracy(lambda rank: 51 - rank, 45.0).found("LS604") == []  # a count


def test_quotients_of_counts_that_are_divided_by_hand_are_recognized():
    quotients.forget()
    read = lambda tensor: quotients.read(tensor)(tensor.tolist(), None)  # noqa: E731
    assert quotients.read(torch.tensor(3)) is None  # in training
    with torch.no_grad():
        for batch in ([20, 5, 8], [40, 2, 1]):
            read(torch.tensor(batch))
        read(torch.tensor(0.37))  # a loss
    single, double = torch.float32, torch.float64
    f1 = 2 * 20 / (2 * 20 + 5 + 8)
    assert quotients.divisors(f1, double)["2 -6 / (2 -6 + -5 + -4)"] == 53
    assert "-3 / (-3 + -2)" in quotients.divisors(float(torch.tensor(40 / 42)), single)
    assert quotients.divisors(f1 + 1e-5, single) == {}
    assert quotients.divisors(0.0, single) is None
    quotients.forget()
    assert quotients.divisors(f1, double) is None


def test_quotients_of_counts_whose_divisors_differ_are_a_warning():
    def averaged(*turns, **keys):
        script = Script()
        for value, by in turns:
            reduced(script, value=value, by_hand=by, **keys)
            script.steps[0] = script.steps[1] = script.steps[0] + 1
        return script.found("LS604")

    value = 0.4943
    uneven = (value, lambda rank: {"f1": 40 + 4 * rank, "other": 12})
    (finding,) = averaged((value, lambda rank: {"f1": 40 + 4 * rank}), (value, {"f1": 44}))
    assert "40 on rank 0, 44 on rank 1" in finding.evidence
    assert averaged((value, {"accuracy": 50})) == averaged(uneven, uneven) == []  # it may be the other, which is right
    assert averaged((value, lambda rank: {f"chance {rank}": 40 + rank})) == []
    assert averaged(uneven, (value, {})) == []
    assert len(averaged(uneven, (1.0, None), (value, {"f1": 40}))) == 1
    assert averaged(uneven, (value, {"f1": 40}), reduce_op="MAX") == []
    simple = [(1 / number, lambda rank: {"f1": 40 + 4 * rank}) for number in (2, 3)]
    assert (len(averaged(simple[0])), len(averaged(*simple))) == (0, 1)


def test_a_metric_that_lightning_logs_for_one_rank_is_a_warning():
    def logged(value=float, **keys):
        return Script().add("log", at=at(33), name="val_loss", value=value, **({"exchanged": False, "world": 2} | keys))

    assert logged().found("LS605")[0].where.line == 33
    assert logged(exchanged=True).found("LS605") == logged(lambda rank: 0.5).found("LS605") == []
    assert logged(only_zero=True).found("LS605") == []
    later = logged(lambda rank: 0.5).add("log", at=at(33), name="val_loss", value=float, exchanged=False, world=2)
    assert later.found("LS605")[0].evidence == "the first val_loss that differs: 0 on rank 0, 1 on rank 1"
    assert "ranks may choose different best checkpoints" in logged(decides=True).found("LS605")[0].cause
    assert "gather_for_metrics" in logged(decides=False).found("LS605")[0].remedy


def test_a_statistic_of_training_that_a_trainer_logs_for_one_rank_is_a_warning():
    def logged(value=float, **keys):
        told = {"name": "accuracy", "exchanged": False, "is_training": True, "world": 2}
        return Script().optimizer().step().add("log", at=at(59), value=value, **(told | keys))

    (finding,) = logged().found("LS605")
    assert (finding.where.line, "0 on rank 0, 1 on rank 1" in finding.evidence) == (59, True)
    assert logged(lambda rank: 0.5).found("LS605") == logged(lambda rank: 1 + 1e-9 * rank).found("LS605") == []
    assert Script().add("log", 0, at=at(59), name="a", value=0.5, exchanged=False, is_training=True).ids() == set()
    assert logged().add("collective", at=at(50), op="reduce").found("LS605") == []  # rank 0 has the sum


def test_a_rounded_mean_is_named_at_its_division():
    def divided(remainder):
        return reduced(dtype="int64").add("floor_division", at=at(45), divisor=2, remainder=remainder)

    assert divided(True).found("LS603")[0].where.line == 45
    assert divided(False).found("LS603") == []


def test_an_evaluation_whose_gather_keeps_repeated_samples_is_named_there():
    script = Script().optimizer()
    script.add("loader", loader=0, epoch=0, at=at(36), made_at=at(18), dataset_size=17, distributed=dealt())
    script.add("gather", at=at(39))
    told = {"backwards": 0, "forwards_eval": 3, "is_complete": True, "batches": 3, "samples": 9}
    (finding,) = script.add("loader_end", loader=0, epoch=0, **told).found("LS601")
    assert (finding.where.line, "gather_for_metrics" in finding.remedy) == (39, True)


def test_values_that_ranks_exchange_in_other_orders_are_named():
    def named(order, **keys):
        script = Script()
        for place in range(3):
            reduced(script, sequence=place, names=lambda rank, place=place: {"name": order(rank)[place]})
        return script

    (finding,) = named(lambda rank: ["loss", "hits", "bias"][:: 1 - 2 * rank]).found("LS505")
    assert (finding.where.line, "loss, hits, bias on rank 0" in finding.evidence) == (44, True)
    assert named(lambda rank: ["loss", "hits", "bias"]).found("LS505") == []
    assert named(lambda rank: [f"rank {rank}"] * 3).found("LS505") == []  # other things, not another order
    assert named(lambda rank: ["loss"] * 3).found("LS505") == []


def sharded(writers, shards=("0.weight",), how="torch.save"):
    script = Script(how="fsdp2").optimizer().step()
    for rank in writers:
        script.add("save", rank, at=at(60), path=f"/runs/{rank}.pt", how=how, shards=list(shards) or None)
    return script


def test_a_file_with_shards_of_one_rank_is_named():
    (finding,) = sharded([0]).found("LS705")
    assert (finding.where.line, finding.ranks) == (60, (0,))
    assert sharded([0, 1]).found("LS705") == []  # each rank writes its own
    assert sharded([0], shards=()).found("LS705") == []


def test_a_file_that_is_read_without_a_barrier_is_a_warning():
    def read(barrier=False, step=False, wrap=False):
        script = Script().add("save", 0, at=at(10), path="/data/words.txt", how="open")
        if barrier:
            reduced(script, op="barrier")
        if step:
            script.optimizer().step()
        if wrap:
            script.add("wrap", at=at(5), model=1, how="ddp", parameters=2, trainable=2, frozen=[], buffers=0)
        return script.add("read", 1, at=at(12), path="/data/words.txt")

    assert read().found("LS706")[0].where.line == 12
    assert read(barrier=True).found("LS706") == read(step=True).found("LS706") == read(wrap=True).found("LS706") == []
    both = (
        Script()
        .add("save", at=at(10), path="/data/words.txt", how="open")
        .add("read", at=at(12), path="/data/words.txt")
    )
    assert both.found("LS706") == []


def test_names_with_a_prefix_that_load_nothing_are_named():
    def loaded(missing, unexpected, of=2):
        return Script().add("state", at=at(16), what="model", id=0, missing=missing, unexpected=unexpected, of=of)

    assert loaded(["a", "b"], ["module.a", "module.b"]).found("LS707")[0].where.line == 16
    assert loaded(["module.a", "module.b"], ["a", "b"]).found("LS707") != []
    assert loaded(None, None).found("LS707") == []
    assert loaded(["head"], ["old_head"]).found("LS707") == []  # another head, on purpose
    assert loaded(["a"], ["module.a"], of=20).found("LS707") == []
    early = [Script(how=None).add("load_state", at=at(12), objects=number) for number in (0, 2)]
    lines = [[each.where.line for each in script.add("wrap", how="ddp").found("LS707")] for script in early]
    assert lines == [[12], []]
    assert Script().add("load_state", at=at(12), objects=0).found("LS707") == []  # a model was wrapped before


def test_a_checkpoint_that_was_renamed_is_known():
    previous = first_run([parts(), parts(shift=3)], save_after=2)
    for event in previous.events:
        if event["kind"] == "save":
            event["path"] = "/runs/last.pt.tmp"
    assert second_run(previous, parts(shift=3)).found("LS703") == []
    rename = {"kind": "rename", "rank": 0, "number": 900, "step": 9, "path": "/runs/last.pt.tmp", "to": "/runs/last.pt"}
    previous.events.append(rename)
    assert len(second_run(previous, parts(shift=3)).found("LS703")) == 1


def test_a_run_that_leaves_an_epoch_out_is_named():
    previous = first_run([parts(), parts(shift=3)], save_after=2)

    def begins(epoch):
        script = second_run(previous, parts(shift=5))
        for event in script.events:
            if event["kind"] == "loader":
                event["distributed"]["epoch"] = epoch
        return script.found("LS703")

    assert "this run starts with epoch 3" in begins(3)[0].evidence
    assert begins(2) == []


def predicted(lines, how=None, saves=0, step=False, end=None, **keys):
    """A loop without gradients over 64 samples in parts, and a file of one rank behind it."""
    script = Script().optimizer().step().epoch(parts(64, 8), train=False, distributed=dealt(), end=end, **keys)
    if how:
        script.add("collective", at=at(41), op=how, group="0", sequence=0, elements=1 if "reduce" in how else None)
    script = script.step() if step else script
    script.add("save", saves, at=at(43), path=lambda rank: f"/runs/rows{rank}.csv", how="open", mode="w")
    return script.add("text", saves, path=lambda rank: f"/runs/rows{rank}.csv", lines=lines)


def test_a_file_with_the_part_of_one_rank_is_a_warning():
    for lines in (32, 33):
        (finding,) = predicted(lines).found("LS607")
        assert (finding.where.line, finding.ranks) == (20, (0, 1))
        assert "rows0.csv" in finding.evidence
    assert len(predicted(32, how="barrier").found("LS607")) == len(predicted(32, how="all_reduce").found("LS607")) == 1
    loop = {"is_complete": False, "batches": 4}  # Lightning does not ask for more
    assert len(predicted(32, end=loop).found("LS607")) == 1
    right = [
        predicted(64),
        predicted(34),
        predicted(31),
        predicted(32, how="all_gather_object"),
        predicted(32, saves=None),  # a file for each rank
        predicted(32, end={"gathered": True}),
        predicted(32, end={"backwards": 4}),
        predicted(32, step=True),
        predicted(32, end={"is_complete": False, "batches": 3}),
        predicted(32, dataset_size=32),
    ]
    assert [script.found("LS607") for script in right] == [[]] * len(right)


def test_labels_that_are_padded_with_a_class_are_a_warning(tmp_path):
    def padded(text="correct = (predictions == labels)[labels != -100]", **keys):
        path = tmp_path / f"{len(text)}.py"
        path.write_text(text)
        told = {"index": 0, "ignored": True, "held": True, "added": lambda rank: 4 * rank} | keys
        return Script().add("padded", at=[str(path), 1, "main"], **told).found("LS608")

    (finding,) = padded()
    assert (finding.where.line, finding.ranks) == (1, (0, 1))
    right = [padded(index=-100), padded(ignored=False), padded(held=False), padded(added=0)]
    right += [padded("model.generate(x)"), padded("pad_across_processes((labels, mask))")]
    assert right == [[]] * 6
