"""Ranks of a mesh that are killed: the run goes on, and ends with the bits of a run that was not disturbed."""

import pytest
import torch

from lockstep.core.checkpoint import files, store
from tests.processes import launched

TASKS = "from tests.mesh.mesh_cases import Cut\n\nclass OnMesh(Cut):\n    pass\n"
TRAIN = ("train", "{folder}/tasks.py:OnMesh", "parallel.strategy=fsdp", "parallel.tensor=2", "train.steps=30")
TRAIN += ("log.writers=[text_log,json_lines]", "optim.clip_norm=0.5", "batch.global=24", "checkpoint.every_steps=5")
FAULTS = [("1", 10, "in-share"), ("2", 15, "before-share"), ("0", 20, "before-rename")]


def state(run):
    newest = store.listed(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


@pytest.mark.exhaustive
@launched(
    (*TRAIN, "--nproc", 4, "--run-dir", "{folder}/killed"),
    (*TRAIN, "--nproc", 4, "--run-dir", "{folder}/undisturbed"),
    LOCKSTEP_FAIL_AT=" ".join(f"{rank}:{step}:{place}:kill:{{folder}}/{place}" for rank, step, place in FAULTS),
)
def test_killed_ranks_of_a_mesh_end_with_the_bits_of_an_undisturbed_run(launch):
    killed, undisturbed = launch.done
    assert killed.returncode == undisturbed.returncode == 0, killed.stderr
    assert all((launch.folder / place).exists() for _, _, place in FAULTS)
    assert "restart 3 of 3" in killed.stderr
    assert "was killed by signal 9" not in undisturbed.stderr  # each fault has happened already
    one, other = state(launch.folder / "killed"), state(launch.folder / "undisturbed")
    assert one[0] == other[0] == 30
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
