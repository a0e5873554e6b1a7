"""Rules on gradient accumulation."""

import torch

from lockstep_audit.observe import means, mixed_passes, training
from lockstep_audit.rules import sources
from packages.audit.tests.made_events import Script, at, dealt, parts


def epochs(batches, accumulate, count=1, complete=True, script=None, carried=0):
    """`carried`: backward passes of an epoch that the first step of the next one adds to its own."""
    script = (script or Script()).optimizer()
    for epoch in range(count):
        first = len(script.events)
        script.epoch(
            parts(2 * batches, 1), epoch=epoch, accumulate=accumulate, complete=complete, distributed=dealt(epoch=epoch)
        )
        seen = set()
        for event in script.events[first:] if epoch else ():
            if event["kind"] == "step" and event["rank"] not in seen:
                seen.add(event["rank"])
                event["backwards"] = event["backwards"] + event["backwards"][:carried]
    return script


def test_micro_batches_that_are_left_over_are_named():
    (finding,) = epochs(7, 3).found("LS401")
    assert (finding.where.line, finding.ranks) == (30, (0, 1))
    assert "7 backward passes in an epoch, a step after every 3, and 1 left over: no step used" in finding.evidence
    (carried,) = epochs(7, 3, count=2, carried=1).found("LS401")
    assert "the next step added them to its own and used 4" in carried.evidence
    cleared = epochs(7, 3, count=2, carried=1)  # zero_grad() at the beginning of each epoch
    for event in (e for e in cleared.events if e["kind"] == "step" and len(e["backwards"]) == 4):
        event["backwards"] = [
            *event["backwards"][:1],
            event["backwards"][1] | {"discarded": True},
            *event["backwards"][2:],
        ]
    assert cleared.found("LS401")[0].evidence.endswith("and 1 left over: no step used their gradients")


def test_accumulation_that_is_right_leaves_nothing_over():
    assert epochs(6, 3, count=2).errors() == set()
    assert epochs(7, 3, complete=False).errors() == set()  # the script stopped in the middle of an epoch
    assert epochs(7, 1).errors() == set()
    assert epochs(7, 3, count=2).errors() == set()  # the count goes on over the ends of epochs
    last = Script().optimizer().epoch(parts(14, 1), accumulate=3, distributed=dealt())
    for rank in range(2):  # the framework steps at the last batch of an epoch
        end = next(e for e in script_ends(last) if e["rank"] == rank)
        last.step(rank)
        step = last.events.pop()
        last.events.insert(last.events.index(end), step | {"number": end["number"]})
        end["number"] += 1
    assert last.errors() == set()


def script_ends(script):
    return [event for event in script.events if event["kind"] == "loader_end"]


def test_a_gan_steps_one_optimizer_more_often_and_leaves_nothing_over():
    script = Script().optimizer(0, 7).optimizer(1, 8).epoch(parts(14, 1), distributed=dealt())
    script.step(number=1, backwards=5)
    assert script.errors() == set()


def losses(ops, accumulate=2, **keys):
    script = Script().optimizer()
    for _ in range(2):
        script.step(backwards=accumulate, **keys)
    for event in script.events:
        for each in event.get("backwards", []):
            each["ops"] = list(ops)
    return script


def test_losses_that_nobody_divides_are_a_warning():
    (finding,) = losses(["NllLossBackward0", "LogSoftmaxBackward0"]).found("LS402")
    assert finding.where.line == 25
    assert losses(["DivBackward0", "NllLossBackward0"]).found("LS402") == []
    assert losses(["MulBackward0", "NllLossBackward0"]).found("LS402") == []
    assert losses(["NllLossBackward0"], accumulate=1).found("LS402") == []


def counted(valid, ops=("DivBackward0", "NllLossBackward0"), accumulate=2):
    batches = [{"loader": 0, "batch": number, "samples": 2, "valid": count} for number, count in enumerate(valid)]
    return losses(ops, accumulate, micro_batches=batches)


def test_unequal_numbers_of_labels_under_a_plain_mean_are_a_warning():
    (finding,) = counted((100, 20)).found("LS403")
    assert "[100, 20]" in finding.evidence
    assert counted((100, 99)).found("LS403") == []
    assert counted((100, 20), ops=("DivBackward0", "SumBackward0")).found("LS403") == []  # divided by all labels
    assert counted(()).found("LS403") == []
    summed = counted((100, 20))
    for each in (each for event in summed.events for each in event.get("backwards", [])):
        each["summed"] = 1
    assert summed.found("LS403") == []  # the remedy of the page
    for event in summed.events:  # by the labels of each micro-batch: a mean of its own
        for each, count in zip(event.get("backwards", []), (100, 20), strict=False):
            each |= {"divisor": float(count), "factor": 1 / count}
    assert len(summed.found("LS403")) == 1


def weighed(sums, ops=("DivBackward0", "NllLossBackward0"), steps=3, factors=None):
    """Steps whose micro-batches are means over labels with these sums of the weights of their classes."""
    script = Script(how=None).optimizer()
    for _ in range(steps):
        script.step(backwards=len(sums))
    for event in script.events:
        for number, each in enumerate(event.get("backwards", [])):
            factor = 0.5 if factors is None else factors[number]
            each |= {"ops": list(ops), "rows": 8, "weights": sums[number], "factor": factor}
    return script.found("LS403")


def test_means_by_class_weights_have_the_sum_of_the_weights_as_units():
    (finding,) = weighed((12.4, 4.7))
    assert "weights of the labels, by micro-batch: " in finding.evidence
    assert "12.4, 4.7" in finding.evidence
    assert weighed((12.4, 12.0)) == []
    assert weighed((12.4,)) == []  # one micro-batch
    assert weighed((12.4, 4.7), factors=(0.6, 0.3)) == []  # the script weights the means
    assert weighed((12.4, 4.7), ops=("AddBackward0", "DivBackward0")) == []
    assert weighed((12.4, 4.7), steps=1) == []  # by chance


def test_the_weights_of_labels_are_counted_as_torch_divides_by_them():
    labels, weight = torch.tensor([0, 2, -100, 2]), torch.tensor([0.5, 1.0, 4.0])
    assert means._counted(labels, weight=weight) == {"labels": 3, "weights": 8.5}
    assert means._counted(labels[:2], weight=weight) == {"rows": 2, "weights": 4.5}
    assert means._counted(labels, reduction="sum", weight=weight) == {"summed": 4}
    assert means._counted(labels) == {"labels": 3}


def selected(rows, ops=("NllLossBackward0",), factor=0.5, steps=3, weight=lambda rank: 1.0):
    """Steps of one backward pass, whose mean is over `rows(rank, step)` labels that the script selected."""
    script = Script(how=None).optimizer().add("hand_reduce", at=at(27), op="SUM", parameters=2, factor=factor)
    for step in range(steps):
        first = len(script.events)
        script.step()
        for event in script.events[first:]:
            for each in event.get("backwards") or ():
                each |= {"ops": list(ops), "rows": rows(event["rank"], step), "factor": weight(event["rank"])}
    return script.found("LS403")


def test_means_over_labels_that_a_script_selects_have_unequal_weights():
    (finding,) = selected(lambda rank, step: 40 + 60 * rank)
    assert (finding.where.line, finding.step) == (25, 0)
    assert "[40] on rank 0, [100] on rank 1" in finding.evidence
    assert selected(lambda rank, step: 40 + 60 * rank * (step == 2)) == []  # a short batch at the end
    scaled = {"ops": ("MulBackward0", "NllLossBackward0")}
    assert len(selected(lambda rank, step: 40 + 60 * rank, weight=lambda rank: 1024.0, **scaled)) == 1  # a GradScaler
    assert selected(lambda rank, step: 40 + 60 * rank, weight=lambda rank: 0.6 + 0.8 * rank, **scaled) == []
    assert selected(lambda rank, step: 40 + 60 * rank, factor=0.3) == []  # the script weights gradients
    assert selected(lambda rank, step: 40 + 60 * rank, ops=("SumBackward0",)) == []


def test_an_exchange_for_each_micro_batch_is_a_warning():
    assert losses(["DivBackward0"]).found("LS404")[0].where.line == 25
    assert losses(["DivBackward0"], accumulate=1).found("LS404") == []
    assert losses(["DivBackward0"], synced=False).found("LS404") == []
    script = losses(["DivBackward0"])
    for event in script.events:
        for each in event.get("backwards", [])[:1]:
            each["synced"] = False
    assert script.ids() == set()


def test_clipping_between_micro_batches_is_a_warning():
    def clips(*before):
        found = [{"at": at(27), "how": "norm", "limit": 1.0, "backwards_before": count} for count in before]
        return losses(["DivBackward0"], clips=found)

    (finding,) = clips(1, 2).found("LS405")
    assert "after 1 of 2" in finding.evidence
    assert clips(2).found("LS405") == []
    assert clips(2, 2).found("LS405") == []


def discards(*marks, lines=(25, 25, 25), steps=2, file=None, **keys):
    """Steps of passes at `lines`. `marks`: of each pass whether gradients of the pass before were gone."""
    script = Script().optimizer()
    for _ in range(steps):
        script.step(backwards=len(lines), **keys)
    for event in script.events:
        for each, line, mark in zip(event.get("backwards", []), lines, marks, strict=False):
            each["at"] = [file, line, "main"] if file else at(line)
            each.update({} if mark is None else {"discarded": mark} | ({"cleared_at": at(22)} if mark else {}))
    return script


def test_gradients_that_are_cleared_between_micro_batches_are_named(tmp_path):
    (finding,) = discards(None, False, True).found("LS406")
    assert (finding.where.line, finding.ranks) == (22, (0, 1))
    assert finding.evidence.startswith("gradients of 2 of 3 backward passes of a step")
    assert len(discards(None, True, True).found("LS406")) == 1
    (clearing, reading) = tmp_path / "clearing.py", tmp_path / "reading.py"
    clearing.write_text("for p in ps:\n    if p.grad is not None:\n        p.grad.zero_()\n")
    reading.write_text("kept = [p.grad.clone() for p in ps]\n")
    assert len(discards(None, True, True, file=str(clearing)).found("LS406")) == 1
    early = [{"at": at(26), "how": "norm", "limit": 1.0, "backwards_before": 1}]
    right = [
        discards(None, False, False),
        discards(None, None, None),  # parameters changed: a closure, or sharpness-aware steps
        discards(None, True, lines=(24, 25)),  # the first pass is for something else, such as inputs
        discards(None, True, True, file=str(reading)),
        discards(None, True, True, rewritten=True),
        discards(None, True, True, clips=early),
        discards(None, True, True, steps=1),
        discards(None, True, True).step(backwards=3),  # it was looked at no closer
    ]
    assert [script.found("LS406") for script in right[:7]] == [[]] * 7
    assert len(right[7].found("LS406")) == 1
    mixed = discards(None, False, False)  # a step that was skipped, or what an epoch left over
    mixed.events[-1]["backwards"][1]["discarded"] = True
    assert mixed.found("LS406") == []


def passes_of(marks, steps=3, **keys):
    """Steps of two passes each. `marks`: keys of the second pass."""
    script = Script().optimizer()
    for _ in range(steps):
        script.step(backwards=2, **keys)
    for event in script.events:
        for number, each in enumerate(event.get("backwards", [])):
            each |= {"ops": ["NllLossBackward0"]} | (marks if number else {})
    return script


def test_several_passes_that_are_no_micro_batches_are_not_accumulation():
    assert passes_of({}).ids() == {"LS402", "LS404"}
    assert passes_of({"began_clear": True}).ids() == set()  # sharpness-aware steps, L-BFGS
    one = [{"loader": 0, "batch": 0, "samples": 4}]
    assert passes_of({}, micro_batches=one).ids() == set()  # two losses of one batch
    two = [{"loader": number, "batch": 0, "samples": 4} for number in range(2)]
    assert passes_of({}, micro_batches=two).ids() == set()  # two tasks
    waiting = passes_of({}, micro_batches=one)
    for each in (each for event in waiting.events for each in event.get("backwards", [])[:1]):
        each |= {"synced": False, "unsynced_by_user": True}
    assert waiting.ids() == {"LS402"}


def test_gradients_that_are_divided_after_the_last_pass_are_not_undivided():
    assert passes_of({}, rescaled=0.5).found("LS402") == []
    assert passes_of({}, rescaled=1.0).found("LS402")
    assert passes_of({"factor": 1024.0}, rescaled=1 / 1024).found("LS402")  # a GradScaler


def test_an_average_that_is_updated_outside_of_the_step_is_a_warning(tmp_path):
    def found(text, line):
        path = tmp_path / "train.py"
        path.write_text(text)
        sources.nodes.cache_clear()
        script = passes_of({})
        for event in script.events:
            if event["kind"] == "step":
                event["at"] = [str(path), line, "main"]
        return [finding.where.line for finding in script.found("LS407")]

    loop = "for b in c:\n    f(b)\n    if b:\n        optimizer.step()\n    "
    assert found(loop + "ema.update(model)\n", 4) == [5]
    assert found(loop + "update_teacher()\n", 4) == [5]
    assert found(loop + "    update_ema()\n", 4) == []
    assert found(loop + "scheduler.step()\n", 4) == []
    assert found("for b in c:\n    optimizer.step()\n    ema.update()\n", 2) == []


def mixed(*turns, count=12):
    """What the critic's step holds of other passes, in rounds of a script with a critic and a generator."""
    critic, generator = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)
    steps = {name: torch.optim.SGD(one.parameters(), 0.1) for name, one in (("c", critic), ("g", generator))}
    looked, x, told, passes = mixed_passes.MixedPasses(), torch.ones(1, 2), [], mixed_passes.recorder.counts
    losses = {"c": lambda: critic(x), "g": lambda: critic(generator(x))}
    for turn in turns * count:
        what, name = turn.split()
        if what == "pass":
            looked.begins(list(steps.values()), training._is_cleared)
            losses[name]().sum().backward()
            passes.backwards += 1
            looked.ends(turn)
        elif what == "step":
            steps[name].step()
            given = looked.stepped(steps[name], turn)
            told += [given] * (name == "c")
        else:
            steps[name].zero_grad()
    return told


def test_gradients_that_an_optimizer_keeps_from_the_pass_of_another_are_seen():
    late = mixed("pass c", "step c", "clear c", "pass g", "step g", "clear g")
    kept = {"at": "pass g", "own_at": "pass c", "used_at": "step g", "alone": True}
    assert (late[0], *late[1:]) == (None, *[kept] * 11)
    first = mixed("pass g", "step g", "clear g", "pass c", "step c", "clear c")
    assert first == [kept] * 12
    assert set(mixed("clear c", "pass c", "step c", "clear g", "pass g", "step g")) == {None, False}
    assert set(mixed("pass g", "step g", "step c", "clear c", "clear g")) == {None}  # one pass for both
    both = mixed("pass g", "step g", "pass g", "step c", "clear c", "clear g")
    assert {each["alone"] for each in both} == {None}  # the last pass reaches both


def test_steps_that_add_gradients_of_the_loss_of_another_optimizer_are_a_warning():
    def found(*turns):
        script = Script().optimizer()
        for turn in turns:
            script.step(mixed=turn)
        return script.found("LS408")

    told = {"at": at(64), "own_at": at(58), "used_at": at(65)}
    (finding,) = found(None, told, told, told)
    assert (finding.where.line, finding.ranks, "train.py:65" in finding.evidence) == (58, (0, 1), True)
    assert found(None, told, told) == found(None, told, told, told, False) == found(None, False, False) == []
    assert found(told, told, told) == []  # a shared part that is meant to add up several passes
    assert len(found(*[told | {"alone": True}] * 3)) == 1
