"""Rules on gradients between the backward pass and the step, on modes, schedules, and what optimizers leave out."""

import itertools

from lockstep_audit.rules import sources
from packages.audit.tests.made_events import Script, at, dealt, parts


def scaled(factor, how="fsdp2", **keys):
    return Script(how=how).optimizer().step(scaling=factor, **keys)


def test_shards_that_are_scaled_by_different_factors_are_named():
    (finding,) = scaled(lambda rank: 0.5 + rank).found("LS208")
    assert (finding.where.line, finding.evidence) == (
        30,
        "between the backward pass and step 0, shards were multiplied by 0.5 on rank 0, 1.5 on rank 1",
    )
    assert scaled(lambda rank: rank + 1.0, clips=[{"at": at(28)}]).found("LS208")[0].where.line == 28
    assert scaled(0.5).errors() == scaled(lambda rank: None).errors() == set()
    assert scaled(lambda rank: 0.5 + rank, how="ddp").found("LS208") == []


def reduced(**keys):
    return (
        Script(how=None).optimizer(owned=0).add("hand_reduce", at=at(27), op="SUM", parameters=2, divided=True, **keys)
    )


def test_sums_that_nobody_waits_for_are_named():
    (finding,) = reduced(unwaited=True).step().found("LS209")
    assert finding.where.line == 27
    assert reduced().step().found("LS209") == []


def test_clipping_before_the_average_is_a_warning():
    def clipped(before):
        return reduced().step(clips=[{"at": at(26), "reduced_before": before}])

    assert clipped(False).found("LS212")[0].where.line == 26
    assert clipped(True).found("LS212") == []
    assert Script().optimizer().step(clips=[{"at": at(26)}]).found("LS212") == []  # the wrapper reduces


def modes(turns, modal=1, ranks=(0, 1)):
    script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", modal=modal).optimizer()
    for is_evaluating in turns:
        for rank in range(2):
            told = {"at": at(25), "synced": True} | ({"evaluating": True} if is_evaluating and rank in ranks else {})
            script.step(rank, backwards=0)
            script.events[-1]["backwards"] = [told]
    return script


def test_a_model_that_stays_in_evaluation_mode_is_a_warning():
    assert modes([False, False, True, True]).found("LS210")[0].where.line == 25
    assert modes([True, True, True], ranks=(0,)).found("LS210")[0].ranks == (0,)
    right = [modes([False] * 4), modes([True] * 4), modes([False, True, False]), modes([False, True, True], modal=0)]
    assert [script.found("LS210") for script in right] == [[], [], [], []]


def lossy(divisor=2, ops=("DivBackward0", "NllLossBackward0"), count=1, **keys):
    script = Script().optimizer()
    for rank in range(2):
        script.step(rank, backwards=count)
        for told in script.events[-1]["backwards"]:
            told |= {"divisor": divisor, "ops": list(ops)} | keys
    return script


def test_a_loss_that_is_divided_by_the_number_of_ranks_is_a_warning():
    assert lossy(by_ranks=True).found("LS211")[0].where.line == 25
    right = [
        lossy(),  # halved for a reason of its own
        lossy(divisor=4, by_ranks=True),
        lossy(ops=("DivBackward0", "SumBackward0"), by_ranks=True),
        lossy(ops=("MulBackward0", "NllLossBackward0"), by_ranks=True),
        lossy(count=2, by_ranks=True),  # by the number of micro-batches
    ]
    assert [script.found("LS211") for script in right] == [[]] * 5


def scheduled(horizon, steps, optimizer_steps=32, name="OneCycleLR", is_outer=True, code=0):
    told = {"made_at": at(9), "name": name, "horizon": horizon, "steps": steps, "is_outer": is_outer}
    return Script().optimizer().add("schedule", optimizer_steps=optimizer_steps, **told).exit(code=code)


def test_schedules_of_another_length_than_the_training_are_a_warning():
    wrong = {
        "once per epoch": scheduled(32, 2),
        "made for epochs": scheduled(4, 32, name="CosineAnnealingLR"),
        "once per rank": scheduled(32, 64, name="LambdaLR"),
        "batches of one process": scheduled(64, 32),
        "step() is missing": scheduled(None, 0, name="StepLR", is_outer=False),
    }
    for words, script in wrong.items():
        (finding,) = script.found("LS307")
        assert (finding.where.line, words in finding.cause) == (9, True), finding
    right = [
        scheduled(32, 32),
        scheduled(33, 33),
        scheduled(3, 3),  # by epochs
        scheduled(100, 32),  # a short run to look at the script
        scheduled(4, 32, name="LinearLR"),  # a warm-up
        scheduled(32, 2, code=1),
        scheduled(None, 2, name="StepLR"),
    ]
    assert [script.found("LS307") for script in right] == [[]] * 7


def by_function(lengths, batches=32, given=None, script=None, ends=(True, False), **keys):
    """A LambdaLR that steps with the batches of two rounds, of which a part may be given only."""
    script, given = script or Script().optimizer(), given or batches
    for epoch in range(2):
        script.add("loader", loader=0, epoch=epoch, at=at(20), batches=batches)
        end = {"loader": 0, "epoch": epoch, "at": at(20), "batches": given, "is_complete": ends[epoch]}
        script.add("loader_end", backwards=given, **end)
    told = {"made_at": at(9), "name": "LambdaLR", "lengths": lengths, "steps": 65, "is_outer": True}
    return script.add("schedule", optimizer_steps=64, **(told | keys)).exit()


def test_functions_with_the_steps_of_all_ranks_are_a_warning(tmp_path):
    for wrong in ([128], [7, 126], [130]):
        (finding,) = by_function(wrong).found("LS307")
        assert (finding.where.line, "batches of one process" in finding.cause) == (9, True)
    right = [
        by_function([64]),
        by_function([128, 62]),  # the other number may be the length
        by_function([100]),
        by_function([133]),
        by_function(None),
        by_function([128], given=30),  # broken off
        by_function([128], script=Script(1).optimizer()),
        by_function([128], script=Script().optimizer().add("stopped", at=at(40))),
        by_function([128], steps=129),  # steps for each rank
        by_function([128], is_outer=False),
    ]
    assert [script.found("LS307") for script in right] == [[]] * len(right)
    text = "for epoch in range(9):\n    for batch in loader:\n        train()\n    if is_good():\n        break\n"
    for name, lines, found in (("a.py", text, 0), ("b.py", text.replace("break", "save()"), 1)):
        (tmp_path / name).write_text(lines)
        script = by_function([128])
        script.events = [e | {"at": [str(tmp_path / name), 2, "main"]} if "at" in e else e for e in script.events]
        assert len(script.found("LS307")) == found


def test_a_learning_rate_of_nothing_is_a_warning():
    def rated(rates):
        script = Script().optimizer()
        for rate in rates:
            script.step(hyperparameters=[{"lr": rate}])
        told = {"made_at": at(9), "name": "LambdaLR", "steps": len(rates), "is_outer": True}
        return script.add("schedule", optimizer_steps=len(rates), **told).exit()

    assert "zero in 8 of 12 steps" in rated([0.1] * 4 + [0.0] * 8).found("LS307")[0].evidence
    assert rated([0.0, 0.05, 0.1] + [0.05] * 8 + [0.0]).found("LS307") == []


def test_parameters_that_no_optimizer_has_are_a_warning():
    assert Script().optimizer(left_out={"0": ["head.weight"]}).found("LS308")[0].where.line == 7
    assert Script().optimizer(left_out={"0": []}).found("LS308") == []
    assert Script().optimizer(left_out={"0": ["a", "b"]}).found("LS308") == []  # none: another kind of optimizer


def test_a_loss_with_parameters_that_no_optimizer_has_is_a_warning():
    module = {"names": ["ArcFace.weight"], "at": [at(12), at(30)]}
    finding = Script().optimizer(untrained=[module]).found("LS308")[0]
    assert finding.where.line == 12
    assert "ArcFace.weight got gradients" in finding.evidence
    assert Script().optimizer(untrained=None).found("LS308") == []


def test_steps_without_gradients_are_named():
    def normed(*norms):
        script = Script().optimizer()
        for norm in norms:
            script.step(gradient_norm=norm)
        return script

    assert normed(0.0, 0.0, 0.0).found("LS309")[0].ranks == (0, 1)
    assert normed(0.0, 0.0, 1.0).found("LS309") == normed(0.0).found("LS309") == normed(1.0, 1.0).found("LS309") == []
    script = normed(lambda rank: float(rank == 0), lambda rank: float(rank == 0))
    assert script.found("LS309") == []  # rank 1 has no rows of the shards
    script = normed(0.0, 0.0)  # cross_entropy with one column
    for each in (each for event in script.events for each in event.get("backwards", [])):
        each["loss"] = -0.0
    assert script.found("LS309")[0].cause == "the loss is 0 in all of these steps, whatever the model predicts"
    for each in (each for event in script.events for each in event.get("backwards", [])):
        each["factor"] = 0.0
    assert script.found("LS309") == []  # a loss that begins to count later


def test_gradients_that_are_never_cleared_are_a_warning(tmp_path):
    file = tmp_path / "train.py"

    def cleared(*turns):
        script = Script().optimizer()
        for turn in turns:
            script.step(was_cleared=turn)
        for event in script.events:
            event["at"] = [str(file), *at(30)[1:]] if event["kind"] == "step" else event.get("at")
        return script

    assert cleared(None, False, False).found("LS310")[0].where.line == 30
    assert cleared(None, False, False, None).found("LS310")  # the last step begins another loop
    assert cleared(None, True, True).found("LS310") == cleared(None, False, True).found("LS310") == []
    assert cleared(None, None, None).found("LS310") == []
    assert cleared(None, False, False).found("LS310")[0].cause == "no zero_grad() in this file"
    file.write_text("optimizer.zero_grad()\n")
    sources.nodes.cache_clear()
    assert cleared(None, False, False).found("LS310")[0].cause is None


def test_an_optimizer_of_parameters_beside_the_wrapped_model_is_named():
    def beside(digest):
        script = (
            Script().optimizer(unwrapped=["0.3"]).epoch(parts(), train=False, distributed=dealt(), end={"backwards": 2})
        )
        told = {"weight": "w", "0.3": digest}
        for rank in range(2):
            mine = {name: value(rank) if callable(value) else value for name, value in told.items()}
            script.step(rank, gradients=mine, parameters=mine)
        return script

    (finding,) = beside(str).found("LS207")
    assert "0.3 of the optimizer are in no wrapped model" in finding.cause
    assert beside(str).found("LS201") == []
    assert beside("same").found("LS207") == []


def test_a_model_that_each_rank_trains_on_its_own_data_and_saves_is_its_own():
    def personal(path, how="ddp", **keys):
        script = Script(how=how).optimizer(owned=0, initial={"0.0": "x"}).add("save", path=path, how="torch.save")
        if how is None:
            script.add("hand_reduce", at=at(28), optimizer=0, op="SUM", parameters=1, divided=True)
        script.epoch(parts(), train=False, end={"backwards": 2}, digest=lambda rank, batch: f"{rank}{batch}", **keys)
        for rank in range(2):
            script.step(rank, gradients={"0.0": str(rank)}, parameters={"0.0": str(rank)})
        return [rule for rule in ("LS201", "LS207") if script.found(rule)]

    assert personal(lambda rank: f"head{rank}.pt") == []
    assert "LS207" in personal("head.pt")
    assert "LS201" in personal(lambda rank: f"state{rank}.pt", how=None)  # gradients are reduced by hand
    assert "LS207" in personal(lambda rank: f"head{rank}.pt", distributed=dealt())


def test_a_state_that_one_rank_loads_explains_replicas_that_part():
    script = Script().optimizer().add("state", 0, what="optimizer", id=0, at=at(15))
    for rank in range(2):
        same, other = {"weight": "g"}, {"weight": str(rank)}
        script.step(rank, gradients=same, parameters=other)
    (finding,) = script.found("LS201")
    assert (finding.where.line, finding.cause) == (15, "the state of the optimizer was loaded on rank 0 only")


def test_a_mean_that_script_and_framework_divide_is_a_warning():
    def divided(divisor, count=4, ops=("DivBackward0", "DivBackward0", "NllLossBackward0")):
        return lossy(divisor=divisor, ops=ops, count=count).found("LS211")

    assert "divided by 16 in each of 4" in divided(16)[0].evidence
    assert divided(4) == divided(16, count=1) == divided(16, ops=("DivBackward0", "SumBackward0")) == []


def test_a_loss_divided_by_the_labels_of_all_ranks_is_a_warning_where_batches_are_drawn_ahead():
    def trained(*divisors, ops=("DivBackward0", "DivBackward0"), **keys):
        script = Script().optimizer()
        for index, divisor in enumerate(divisors):
            for rank in range(2):
                drawn = [10 + rank, 20] if index == 0 else [20 + 10 * index]  # one ahead of the step
                script.step(rank, micro_batches=[{"loader": 0, "batch": 0, "samples": 4, "valid": n} for n in drawn])
                script.events[-1]["backwards"][0] |= {"divisor": divisor, "ops": list(ops), "loss_at": at(39)} | keys
        return script.found("LS211")

    assert [finding.where.line for finding in trained(21.0, 40.0, 1.0)] == [39]
    assert [finding.where.line for finding in trained(21.0, 40.0, divided_at=at(41))] == [41]
    assert "divided by 21, the labels" in trained(21.0, 40.0)[0].evidence
    assert trained(21.0) == trained(21.0, 21.0, 21.0) == trained(1.0, 40.0) == []  # by chance
    assert trained(40.0, 60.0) == trained(21.0, 40.0, ops=("DivBackward0", "MulBackward0")) == []
    assert trained(21.0, 40.0, ops=("DivBackward0", "DivBackward0", "MulBackward0")) == []  # by the number of ranks
    assert trained(21.0, 40.0, ops=("DivBackward0", "DivBackward0", "AddBackward0", "MulBackward1"))  # smoothed labels


def test_a_loss_divided_by_the_labels_of_all_ranks_without_the_first_of_each_row_is_a_warning():
    def trained(divisor, ops=("DivBackward0", "DivBackward0", "AddBackward0")):
        script = Script().optimizer()
        for more, rank in itertools.product((0, 4), range(2)):
            counts = {"valid": 24 + more, "shifted": 20 + more + rank}
            batches = [{"loader": 0, "batch": n, "samples": 4, **counts} for n in (0, 1)]
            script.step(rank, micro_batches=batches, backwards=2)
            for told in script.events[-1]["backwards"]:
                told |= {"divisor": divisor + 4 * more, "ops": list(ops), "loss_at": at(39)}
        return script.found("LS211")

    assert "divided by 82, the labels that count after the first" in trained(82.0)[0].evidence
    assert trained(41.0) == trained(1.0) == trained(82.0, ("DivBackward0", "MulBackward0", "DivBackward0")) == []


def test_a_mean_that_a_trainer_multiplies_by_the_number_of_ranks_is_a_warning():
    def scaled(mean, model=None):
        return Script().add("scaled_loss", at=at(29), op="MeanBackward0", mean=mean, by=2, model=model).found("LS218")

    (finding,) = scaled(True)
    assert (finding.where.line, "main() ignores num_items_in_batch" in finding.cause) == (29, True)
    assert "the loss of BertModel" in scaled(True, "BertModel")[0].cause
    assert scaled(False) == []


def test_class_weights_that_differ_are_a_warning():
    def weighted(digest):
        return Script().add("class_weights", at=at(24), digest=digest, classes=3)

    assert weighted(str).found("LS213")[0].where.line == 24
    assert weighted("same").found("LS213") == []


def test_copies_of_a_model_that_part_are_a_warning():
    def copied(digest, ranks=(0, 1)):
        script = Script().optimizer().step()
        for rank in range(2):
            told = {"0": {"class": "Net", "at": at(22), "digest": digest(rank)}}
            script.exit(rank, copies=told if rank in ranks else None)
        return script

    assert copied(str).found("LS214")[0].where.line == 22
    assert copied(lambda rank: "same").found("LS214") == copied(str, ranks=(0,)).found("LS214") == []


def test_a_frozen_teacher_that_differs_from_its_first_call_on_is_a_warning():
    def teacher(digest, names="same", before=str, how="ddp", ranks=None):
        script = Script(how=None).add("wrap", at=at(5), model=0, how=how, before=before)
        told = {"class": "Net", "digest": digest, "names_digest": names, "is_early": True, "changes": 3}
        return script.optimizer().add("frozen", ranks, at=at(22), made_from=[at(3)], **told).step()

    (finding,) = teacher(str).found("LS214")
    assert (finding.where.line, "before the wrapper" in finding.cause) == (3, True)
    assert teacher(str, before="same").found("LS214")[0].where.line == 3
    right = [teacher("same"), teacher(str, names=str), teacher(str, how="fsdp2"), teacher(str, ranks=0)]
    assert [script.found("LS214") for script in right] == [[]] * 4


def test_equal_parameters_with_parts_of_their_gradients_are_a_warning():
    def split(before=str, constant=(), shard=str, grads="same", op="all_reduce"):
        script = Script(how=None).add("collective", op=op, at=at(19), dtype="float32", shape=[16, 8])
        start = {"first": lambda rank: "f", "last": lambda rank: "l", "shard": shard}
        for rank in range(2):
            initial = {name: value(rank) for name, value in start.items()}
            script.add("optimizer", rank, made_at=at(7), optimizer=0, initial=initial, constant=[*constant])
        for rank in range(2):
            gradients = {"first": before(rank), "last": grads, "shard": str(rank)}
            script.step(rank, gradients=gradients, parameters={name: f"{name} {rank}" for name in gradients})
        return script

    (finding,) = split().found("LS217")
    assert (finding.where.line, "1 parameter that is equal on all ranks (first)" in finding.evidence) == (25, True)
    right = [
        split(before=lambda rank: "g"),  # the parts are added up
        split(constant=["first"]),  # the bias of a split layer
        split(shard=lambda rank: "s"),
        split(grads=None),  # nothing tells that the losses are equal
        split(op="all_to_all"),
        split().add("hand_reduce", at=at(27), op="SUM", parameters=1),
    ]
    assert [script.found("LS217") for script in right] == [[]] * 6


def test_a_hook_that_gives_the_sum_is_named():
    def hooked(got):
        script = Script().optimizer().add("hook", at=at(12), model=0, name="half")
        for _ in range(2):
            script.add("hook_sums", model=0, sums=lambda rank: {"weight": [3.0 + rank, got], "bias": [-1.0, got - 9.0]})
            script.step()
        return script.found("LS205")

    assert [finding.where.line for finding in hooked(7.0)] == [12]  # 3 + 4, and -1 - 1
    assert hooked(3.5) == []


def test_numbers_that_one_rank_has_one_for_one_instead_of_others_are_named():
    def held(numbers):
        script = Script().optimizer().add("numbers", at=at(29), held=lambda rank: {"ids": numbers(rank)})
        return script.step().found("LS110")

    assert len(held(lambda rank: [n * (1 + 4 * rank) % 17 for n in range(16)] * 4)) == 1
    assert held(lambda rank: [n + rank for n in range(16)] * 4) == []  # shifted: each rank has a part
    assert held(lambda rank: [n * n % (7 + 4 * rank) for n in range(64)]) == []


def test_a_sum_over_ranks_inside_a_loss_is_named():
    def summed(elements=1, divisor=2.0, times=1.0, **keys):
        told = {"at": at(24), "elements": elements, "divisor": divisor, "times": times}
        return lossy(divisor=1, reduced=told, **keys).found("LS211")

    assert [finding.where.line for finding in summed()] == [24]
    assert summed(divisor=1.0) == []  # the gradient of the rank's own loss is right
    assert len(summed(divisor=4.0, count=2)) == 1  # two micro-batches
    assert len(summed(elements=36, divisor=1.0)) == 1
    assert summed(elements=36, divisor=1.0, times=2.0) == []  # multiplied by the ranks
    assert [finding.where.line for finding in lossy(divisor=1, one_of=2).found("LS211")] == [25]
    assert lossy(divisor=1, one_of=3).found("LS211") == []


def test_a_loss_that_is_halved_by_a_constant_is_not_divided_by_the_ranks(tmp_path):
    (tmp_path / "a.py").write_text("loss = f(x) / 2\nloss = f(x) / world\nloss = f(x) / accum\n")
    found = [lossy(by_ranks=True, divided_at=[str(tmp_path / "a.py"), row, "main"]).found("LS211") for row in (1, 2, 3)]
    assert list(map(bool, found)) == [False, True, False]
