"""Steps that are made again have the losses, norms and states of the training."""

import json

import pytest
import torch

from lockstep import Trainer
from lockstep.core.checkpoint import store
from lockstep.core.parallel.world import join_world
from lockstep.trainer import assemble
from lockstep.watch import replay
from tests import own_tasks
from tests.ranks import run_ranks
from tests.watch import cases


def replayed(settings, folder, begin, until):
    """Loss and norm by step, and the digests at the end, of a run that is rebuilt at a checkpoint."""
    trainer = Trainer(settings, run_dir=folder, quiet=True)
    with join_world("cpu", 60) as world:
        config = trainer.config.model_copy(update={"batch": trainer.config.batch.resolve(world.size)})
        trainer.config = config
        checkpoint = None if begin == 0 else replay.nearest(folder / "checkpoints", begin)
        run = assemble.rebuilt(trainer.setup, own_tasks.Deep(), world, checkpoint)
        assert run.state.step == begin
        steps = [(one.step, one.loss["loss"], one.grad_norm) for one in replay.steps(run, until)]
        return steps, replay.digests(run)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_a_replay_is_the_training(tmp_path, strategy):
    settings = cases.settings(2, strategy, log={"every_steps": 1})
    run_ranks(2, cases.end_of, None, settings, tmp_path)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = {one["step"]: one for one in logged if "train/loss" in one}
    assert store.listed(tmp_path / "checkpoints")[0].checked_step == 12
    for begin in (0, 6):
        ranks = run_ranks(2, replayed, settings, tmp_path, begin, 9)
        for steps, digests in ranks:
            assert [step for step, *_ in steps] == list(range(begin + 1, 10))
            for step, loss, norm in steps:
                assert loss == logged[step]["train/loss"]
                assert norm == pytest.approx(logged[step]["train/grad_norm"], rel=1e-12)
            if strategy == "ddp":
                assert digests == ranks[0][1]
    again = run_ranks(2, replayed, settings, tmp_path, 8, 12)
    of_checkpoint = run_ranks(2, replayed, settings, tmp_path, 12, 12)
    for (_, one), (_, other) in zip(again, of_checkpoint, strict=True):
        assert one == other, "the state of step 12, made again, has the bits of its checkpoint"


def test_checked_checkpoints_and_suspects_are_listed(tmp_path, capsys):
    from lockstep.cli import inventory
    from lockstep.core.checkpoint.retention import CheckpointConfig

    fault = {"kind": "activation", "after": 11}
    run_ranks(3, cases.end_of, fault, cases.settings(3, "ddp"), tmp_path)
    assert torch.load(tmp_path / "watch/step-9/rank-0.pt", weights_only=False)["step"] == 9
    assert inventory.show(tmp_path / "checkpoints", CheckpointConfig(keep_last=9), check=True, prune=False)
    shown = capsys.readouterr().out
    assert shown.count("  valid  checked") == 3
    assert "suspect-step-00000008  SET ASIDE by the watch" in shown
    kept = CheckpointConfig(keep_last=1).reasons(store.listed(tmp_path / "checkpoints"))
    assert kept == {6: ["last", "checked"]}
