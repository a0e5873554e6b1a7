"""`lockstep verify` accuses no task whose forward pass writes into parameters, and finds what recomputation changes."""

from types import SimpleNamespace

import pytest

from lockstep.configs import config_file
from lockstep_lab.verify import command
from lockstep_lab.verify.checks.resume import determinism
from lockstep_lab.verify.recorder import Recording
from packages.lab.tests.verify import moving_tasks
from tests import ranks, runs
from tests.selection import mainly


@pytest.mark.parametrize("kinds", mainly([["Follower"]], [["Follower"], ["Indexed", "Clamped"]]), ids="-".join)
def test_parameters_that_no_optimizer_updates_are_no_fault(tmp_path, kinds):
    for kind in kinds:
        not_shown = "accumulation" if kind == "Follower" else None
        settings = runs.config(task={"kind": f"{moving_tasks.__file__}:{kind}Task"}, batch={"global": 12})
        config = config_file.parse(settings).model_dump(by_alias=True)
        result = command.verify(
            config,
            1,
            tmp_path / kind,
            checks=["gradients", "accumulation"],
            quick=True,
            steps=4,
            tell=lambda _: None,
            workers=ranks._ranks,
        )
        found = {check.name: (check.status, check.reason) for check in result.checks}
        assert "fault" not in {status for status, _ in found.values()}, (kind, found)
        assert (found["accumulation"][0] == "not shown") == (not_shown == "accumulation"), (kind, found)


def test_recomputation_that_trains_another_model_is_a_fault():
    def experiments(loss, **compute):
        with_it, without = (
            Recording(entries=[{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": last}]) for last in (0.5, loss)
        )
        return SimpleNamespace(
            config={"compute": {"activation_checkpointing": True, "compile": None} | compute},
            undisturbed=lambda: [with_it],
            undisturbed_again=lambda: [with_it],
            without_recomputation=lambda: [without],
            probe=lambda: SimpleNamespace(random=[]),
            steps=2,
            nproc=1,
        )

    assert determinism(experiments(0.5)).status == "passed"
    assert determinism(experiments(0.6, activation_checkpointing=False)).status == "passed"
    found = determinism(experiments(0.6))
    assert found.status == "fault"
    assert "compute.activation_checkpointing trains a different model" in found.reason
