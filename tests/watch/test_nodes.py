"""On several nodes, the node of a guilty rank takes no part any more, and the others go on from what is checked."""

import json
import os
import subprocess

import pytest

from tests import processes
from tests.launch.test_several_nodes import free_port
from tests.processes import HANG_S
from tests.watch import cases, lying_task

SETTINGS = ["watch.every=3", "train.steps=12", "checkpoint.every_steps=2", "checkpoint.mode=sync", "batch.global=24"]


@pytest.mark.exhaustive
def test_the_node_of_a_guilty_rank_is_left_out(tmp_path):
    port, run = free_port(), tmp_path / "run"
    begun = []
    for name in ("a", "b"):
        options = ["--nnodes", "1:2", "--rendezvous", f"127.0.0.1:{port}", "--run-dir", run]
        begun.append(
            subprocess.Popen(
                processes.command("train", f"{lying_task.__file__}:Lying", *SETTINGS, "device=cpu", *options),
                env=processes.environment(LOCKSTEP_NODE=name, PYTHONPATH=os.environ.get("PYTHONPATH", "")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        )
    done = [(process.communicate(timeout=HANG_S)[0], process.returncode) for process in begun]
    verdict = cases.verdict_of(run)
    assert (verdict["kind"], verdict["guilty"], verdict["step"]) == ("memory", [1], 8)
    assert sorted(code for _, code in done) == [0, 3], "\n".join(text for text, _ in done)
    for text, code in done:
        assert "will no longer take part: the others continue" in text
        if code == 3:
            assert "this node no longer takes part" in text
    assert cases.saved(run)[0][-1] == 12
    assert json.loads((run / "environment.json").read_text())["world"] == 1
