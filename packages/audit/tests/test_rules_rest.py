"""Rules on evaluations, metrics, files, going on, and devices."""

import pytest

from lockstep_audit.rules.catalogue import ALL
from packages.audit.tests.made_events import Script, at, dealt, parts


def evaluated(samples=9, **end):
    script = Script().optimizer().step()
    end = {"samples": samples, "forwards_eval": 8} | end
    return script.epoch(parts(), train=False, distributed=dealt(), dataset_size=17, end=end)


def test_an_evaluation_that_counts_padding_is_a_warning():
    (finding,) = evaluated().found("LS601")
    assert "18 samples were evaluated on ranks 0, 1, but the data set has 17" in finding.evidence
    assert evaluated(gathered=True).found("LS601") == []
    assert evaluated(samples=8).found("LS601") == []
    assert evaluated(is_complete=False).found("LS601") == []  # a check before training
    assert evaluated(forwards_eval=0).found("LS601") == []


def test_buffers_that_differ_at_an_evaluation_are_a_warning():
    def buffers(digest, how="ddp", ranks=None):
        return Script(how=how).add(
            "buffers", ranks, at=at(50), model=0, digests=lambda rank: {"running_mean": digest(rank)}
        )

    (finding,) = buffers(str).found("LS602")
    assert (finding.where.line, finding.evidence) == (50, "1 buffer differs between ranks 0, 1: running_mean")
    assert buffers(lambda rank: "equal").ids() == set()
    assert buffers(str, how="data_parallel").found("LS602") == []
    assert buffers(str, ranks=0).ids() == set()  # only rank 0 evaluates


def test_buffers_of_a_frozen_part_that_differ_are_named_where_it_is_set_to_train_mode(tmp_path):
    (file := tmp_path / "train.py").write_text("trainer.train()\nnet.train(False)\nmodel.train()\n")

    def line(frozen):
        script = Script()
        script.events[-1]["frozen"] = script.events[-2]["frozen"] = frozen
        script.add(
            "buffers", at=[str(file), 2, "main"], model=0, digests=lambda rank: {"teacher.1.running_mean": str(rank)}
        )
        return script.found("LS602")[0].where.line

    assert (line(["teacher.1.weight"]), line(["head.weight"])) == (3, 2)


def test_means_of_whole_numbers_are_named():
    def mean(rounded):
        keys = {"op": "all_reduce", "dtype": "torch.int64", "shape": [], "group": "0", "sequence": 0}
        return Script().add("collective", at=at(44), divided_integer=rounded, **keys)

    assert mean(True).found("LS603")[0].where.line == 44
    assert mean(False).errors() == mean(None).errors() == set()


def saved(path="/runs/last.pt", how="torch.save", script=None, ranks=None, **keys):
    return (script or Script()).optimizer().step().add("save", ranks, at=at(60), path=path, how=how, **keys)


def test_a_checkpoint_that_all_ranks_write_is_named():
    (finding,) = saved().found("LS701")
    assert (finding.where.line, finding.ranks) == (60, (0, 1))
    nodes = Script()
    nodes.events = [
        event | ({"host": str(event["rank"])} if event["kind"] == "start" else {}) for event in nodes.events
    ]
    right = [
        saved(ranks=0),
        saved(path=lambda rank: f"/runs/rank{rank}.pt"),
        saved(how="dcp"),  # every rank writes a part
        saved(script=nodes),  # a disk for each node
        saved(path="/dev/null", how="open"),
        saved(ranks=0).step().add("save", 1, at=at(60), path="/runs/last.pt", how="torch.save"),  # in turns
    ]
    assert [script.ids() for script in right] == [set()] * 6


def test_another_file_that_all_ranks_write_is_a_warning():
    assert saved(how="open", path="/runs/args.json").ids() == {"LS702"}
    (finding,) = saved(how="open", mode="a+", path="/runs/log.csv").found("LS702")
    assert finding.cause == "every rank appends its own rows"
    assert saved(how="open", path=lambda rank: f"/runs/log-{rank}.txt").ids() == set()
    assert saved(how="open", path="/runs/args.json", ranks=0).ids() == set()


def first_run(orders, save_after):
    """Epochs, and a checkpoint after so many of them."""
    script = Script().optimizer()
    for epoch, order in enumerate(orders):
        if epoch == save_after:
            script.add("save", 0, at=at(60), path="/runs/last.pt", how="torch.save", keys=["model", "epoch"])
        script.epoch(order, epoch=epoch, distributed=dealt(epoch=epoch))
    if save_after >= len(orders):
        script.add("save", 0, at=at(60), path="/runs/last.pt", how="torch.save", keys=["model", "epoch"])
    return script.history


def second_run(previous, order, restored=("model", "optimizer"), name="AdamW", path="/runs/last.pt"):
    script = Script(previous=previous).add("load", at=at(15), path=path, keys=["model"])
    for what in restored:
        script.add("state", at=at(16), what=what, id=0)
    return script.optimizer(**{"class": name}).epoch(order, distributed=dealt())


def test_a_run_that_repeats_an_epoch_after_going_on_is_named():
    previous = first_run([parts(), parts(shift=3)], save_after=2)
    (finding,) = second_run(previous, parts(shift=3)).found("LS703")
    assert finding.where.line == 20
    assert "the file was saved after epoch 1" in finding.evidence
    assert second_run(previous, parts(shift=5)).errors() == set()
    assert second_run(None, parts(shift=3)).errors() == set()
    assert second_run(previous, parts(shift=3), path="/models/pretrained.pt").errors() == set()
    plain = first_run([parts(), parts()], save_after=2)  # without shuffling, all epochs are alike
    for event in plain.events:
        if event["kind"] == "loader":
            event["distributed"]["shuffle"] = event["shuffles"] = False
    assert second_run(plain, parts()).errors() == set()


def test_a_run_without_a_loader_that_draws_the_inputs_of_its_beginning_again_is_named():
    def inputs(script, digest, steps=4):
        for step in range(steps):
            script.add("inputs", at=at(23), model=0, digest=lambda rank, step=step: digest(rank, step)).step()
        return script

    def resumed(digest):
        first = inputs(Script().optimizer(), lambda rank, step: f"{rank} {step}", 5)
        first.add("save", 0, at=at(60), path="/runs/last.pt", how="torch.save")
        script = Script(previous=first.history).add("load", at=at(15), path="/runs/last.pt", keys=["model"])
        for what in ("model", "optimizer"):
            script.add("state", at=at(16), what=what, id=0)
        return inputs(script.optimizer(), digest).found("LS703")

    (finding,) = resumed(lambda rank, step: f"{rank} {step}")
    assert (finding.where.line, "the first 4 examined steps" in finding.evidence) == (15, True)
    assert resumed(lambda rank, step: f"{rank} {step + 5}") == resumed(lambda rank, step: f"{rank} {step % 2}") == []


def test_a_run_that_begins_an_epoch_anew_is_named():
    script = Script().optimizer().epoch(parts(), distributed=dealt())
    place = next(n for n, e in enumerate(script.events) if e["kind"] == "batch" and e["rank"] == 0 and e["batch"] == 3)
    number, step = script.events[place]["number"], script.events[place]["step"]
    save = {"kind": "save", "rank": 0, "number": number, "step": step, "path": "/runs/last.pt", "how": "torch.save"}
    for event in script.events[place:]:
        event["number"] += event["rank"] == 0
    script.events.insert(place, save)
    (finding,) = second_run(script.history, parts()).found("LS703")
    assert "of 6 samples before the save, 6 come again" in finding.evidence
    rest = second_run(script.history, lambda rank: parts()(rank)[3:])
    assert rest.errors() == set()


def test_batches_that_were_used_are_those_of_micro_batches():
    """8 batches in steps of 2: the file is saved behind the second step, and the run goes on in another order."""

    def saved_within(order):
        script = Script().optimizer().epoch(parts(32), accumulate=2, distributed=dealt())
        steps = [n for n, e in enumerate(script.events) if e["kind"] == "step" and e["rank"] == 0]
        last = script.events[steps[1]]
        save = {"kind": "save", "rank": 0, "number": last["number"] + 1, "step": last["step"] + 1}
        for event in script.events[steps[1] + 1 :]:
            event["number"] += event["rank"] == 0
        script.events.insert(steps[1] + 1, save | {"path": "/runs/last.pt", "how": "torch.save"})
        return second_run(script.history, order).found("LS703")

    assert len(parts(32)(0)) == 8
    assert saved_within(lambda rank: parts(32)(rank)[4:]) == []
    (finding,) = saved_within(parts(32))
    assert "of 8 samples before the save, 8 come again" in finding.evidence
    (finding,) = saved_within(lambda rank: [*parts(32)(rank)[6:], *[[90 + n, 91 + n] for n in range(4)]])
    assert "8 samples were left of the epoch" in finding.evidence


def test_a_run_that_goes_on_without_the_state_of_its_optimizer_is_named():
    previous = first_run([parts()], save_after=1)
    (finding,) = second_run(previous, parts(shift=3), restored=("model",)).found("LS704")
    assert "restored model, but not the optimizer" in finding.evidence
    assert second_run(previous, parts(shift=3)).errors() == set()
    assert second_run(previous, parts(shift=3), restored=("model",), name="SGD").errors() == set()
    assert second_run(previous, parts(shift=3), restored=()).errors() == set()
    other = second_run(previous, parts(shift=3), restored=("model",), path="/models/pretrained.pt")
    assert other.errors() == set()  # fine-tuning


@pytest.mark.parametrize(("how", "uuid", "found"), [("ddp", "a", 1), ("ddp", "own", 0), (None, "a", 0)])
def test_ranks_that_share_a_gpu_are_named(how, uuid, found):
    script = Script(how=how).add("device", device="cuda:0", uuid=lambda rank: f"{uuid}{rank * (uuid == 'own')}")
    assert len(script.found("LS801")) == found


def test_data_parallel_is_a_warning():
    assert Script(1, how="data_parallel").ids() == {"LS802"}
    assert Script(1).ids() == Script(1, how="fsdp1").ids() == set()


@pytest.mark.parametrize("rule", ALL, ids=[rule.id for rule in ALL])
def test_every_rule_has_an_answer_where_nothing_happened(rule):
    empty = Script(how=None)
    assert isinstance(rule.check(empty.history), str) or rule.check(empty.history) == []


def test_rules_have_ids_and_names_of_their_own():
    assert len({rule.id for rule in ALL}) == len({rule.name for rule in ALL}) == len(ALL) >= 29
    assert sum(rule.severity == "error" for rule in ALL) >= 22


def test_batches_that_a_resumed_run_leaves_out_of_every_epoch_are_named(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("for step, batch in enumerate(loader):\n    if step < done:\n        continue\n    backward()\n")

    def resumed(skips=(None, None), passed=(0, 0), what="optimizer"):
        script = Script().add("state", what=what).optimizer()
        for epoch, (skip, count) in enumerate(zip(skips, passed, strict=True)):
            told = {"loader": 0, "epoch": epoch, "sampler": 3}
            script.add("loader", at=[str(path), 1, "main"], skips=skip, **told)
            for first, last in ((0, count), (count + 1, count + 1)):
                given = [{"loader": 0, "batch": number, "samples": 2} for number in range(first, last + 1)]
                script.step(micro_batches=given, backwards=1)
                for event in script.events[-2:]:
                    event["backwards"] = [{"at": [str(path), 4, "main"]}]
            script.add("loader_end", batches=4, backwards=2, is_complete=True, **told)
        return [finding.where.line for finding in script.found("LS703")]

    assert resumed(skips=([8, at(64)], [8, at(64)])) == [64]
    assert resumed(passed=(2, 2)) == [2]
    right = [resumed(skips=([8, at(64)], None)), resumed(passed=(2, 0)), resumed(passed=(2, 2), what="model")]
    assert right == [[]] * 3


def test_a_vocabulary_that_each_rank_numbers_is_named():
    def numbered(*orders, names=("vocab", "vocab")):
        ids = [{names[rank]: {word: place for place, word in enumerate(order)}} for rank, order in enumerate(orders)]
        return Script().optimizer().add("vocabulary", at=at(20), ids=lambda rank: ids[rank]).found("LS110")

    (finding,) = numbered("abcdefgh", "hgfedcba")
    assert (finding.where.line, "`vocab` gives 'a' the number 0 on rank 0, 7 on rank 1" in finding.evidence) == (
        20,
        True,
    )
    assert numbered("abcdefgh", "abcdefgh") == numbered("abcdefgh", "ijklmnop") == []
    assert numbered("abcdefgh", "abcdefghxyz") == numbered("abcdefgh", "hgfedcba", names=("vocab", "other")) == []


def test_running_statistics_outside_of_wrappers_are_compared(tmp_path):
    path = tmp_path / "norm.py"
    path.write_text("self.mean.add_(x)\nself.hits += 1\nself.total.mul_(0.9)\n")

    def ended(name, digest):
        told = {"files": [str(path)], "made_from": [at(9)], "digests": lambda rank: {name: digest(rank)}}
        outside = lambda rank: {"Norm 9 0": {k: v(rank) if callable(v) else v for k, v in told.items()}}  # noqa: E731
        return [finding.where.line for finding in Script().optimizer().exit(outside=outside).found("LS606")]

    assert (ended("mean", str), ended("total", str)) == ([1], [3])
    assert ended("hits", str) == ended("mean", lambda rank: "same") == []  # a counter; summed over ranks
