"""How the results of checks end."""

from lockstep_lab.verify import command
from lockstep_lab.verify.experiments import ExperimentFailed
from lockstep_lab.verify.next_step import finished
from lockstep_lab.verify.result import fault, not_shown, passed
from packages.lab.tests.verify.made_up import experiments

LONG = "the model draws random numbers in addition to dropout (randn_like), different ones on each rank"


def named(name, result):
    result.name = name
    return result


def end(result, *earlier, target="task.py:Task"):
    return finished(result, earlier, target, "runs/x/verify.log")


def test_a_fault_ends_with_a_likely_cause_and_the_next_command():
    found = end(named("ranks", fault("2 ranks train a different model")))
    assert found.reason.startswith("2 ranks train a different model. Likely cause: a loss that depends on the split")
    assert found.reason.endswith(". Next: lockstep verify task.py:Task --checks bits")
    assert end(named("ranks", fault("x")), target="a.py").reason.endswith("lockstep verify a.py --checks ranks")


def test_a_cause_that_is_known_a_page_and_an_error_are_used():
    found = end(named("gradients", fault("0.63 off", "samples mix: lockstep --explain global_loss")))
    assert found.reason == (
        "0.63 off. Likely cause: samples mix: lockstep --explain global_loss. Next: lockstep --explain global_loss"
    )
    assert end(named("loss", fault("the experiment failed: x"))).reason.endswith("x. Next: less runs/x/verify.log")
    assert end(named("bits", fault("x. Next: y"))).reason == "x. Next: y"


def test_one_cause_is_one_fault():
    first, again = (named(name, fault("off", "samples mix")) for name in ("gradients", "ranks"))
    assert end(first).status == "fault"
    found = end(again, first)
    assert (found.status, found.reason) == ("not shown", "cannot be shown because of the cause that gradients names")
    assert end(named("ranks", fault("off", "other")), first).status == "fault"


def test_one_error_of_several_experiments_is_one_fault(monkeypatch):
    def failing(experiments):
        raise ExperimentFailed("overfit", "rank 0 stopped because rank 1 failed: Task.loss: no head")

    monkeypatch.setitem(command.CHECKS, "loss", failing)
    first, again = (command._make_check("loss", experiments()) for _ in range(2))
    assert (first.status, first.cause) == ("fault", "Task.loss: no head")
    assert end(again, first).status == "not shown"


def test_a_long_reason_is_repeated_by_the_name_of_its_check():
    first = named("gradients", not_shown(LONG))
    assert end(named("ranks", not_shown(LONG)), first).reason == "as for gradients"
    assert end(first).reason == first.reason
    assert end(named("ranks", not_shown("short")), named("probe", not_shown("short"))).reason.endswith("short")
    assert end(named("loss", passed("falls"))).reason == "falls"
