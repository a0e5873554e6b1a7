"""The table of `log.probe_every_epochs`: the same figures on any ranks, and a warning if replicas differ."""

import re

import pytest
import torch

from lockstep import Part, Trainer
from tests import own_tasks, runs
from tests.core.test_strategies import settings_for
from tests.ranks import run_ranks

TRAIN = {"steps": None, "epochs": 4}


class Flips(Part):
    """Changes a bit of a weight on the last rank, after a step."""

    def after_step(self, training):
        if training.step == 12 and training.rank == training.ranks - 1:
            last = list(training.model.parameters())[-1]
            last.data.view(torch.int64)[0] ^= 1 << 40


def trained(settings, folder, flips=False):
    weights = runs.FinalWeights()
    parts = [Flips()] if flips else []
    Trainer(settings, run_dir=folder, quiet=True, parts=parts).fit(own_tasks.Classes(length=100), weights)
    return weights.tensors


def table_of(folder):
    """(lines that head a table, rows of all tables)."""
    lines = [line.partition("  ")[2] for line in (folder / "train.log").read_text().splitlines()]
    begins = [place for place, line in enumerate(lines) if "probe after" in line]
    rows = [re.split(" {2,}", line.strip()) for place in begins for line in lines[place + 2 : place + 6]]
    return [lines[place] for place in begins], [row for row in rows if len(row) == 5]


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_table_has_norms_and_digests_of_parameters_by_rank(strategy, world, tmp_path):
    settings = settings_for(world, {"strategy": strategy}, train=TRAIN)
    plain = run_ranks(world, trained, settings, tmp_path / "plain")[0]
    settings["log"] = settings["log"] | {"probe_every_epochs": 2}
    found = run_ranks(world, trained, settings, tmp_path / "probed")[0]
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    heads, rows = table_of(tmp_path / "probed")
    said = {"single": " on 1 rank", "ddp": ": the same bits on 2 ranks"}
    said["fsdp"] = ", sharded over 2 ranks: the same bits wherever ranks hold the same rows"
    count = len([name for name in found if name.endswith(("weight", "bias"))])
    assert heads == [f"probe after epoch {epoch}: {count} parameter tensors{said[strategy]}" for epoch in (2, 4)]
    last = rows[len(rows) // 2 :]
    for name, norm, total, gradient, digests in last:
        assert float(norm) == pytest.approx(float(found[name].norm()), rel=1e-5)
        assert float(total) == pytest.approx(float(found[name].sum()), rel=1e-4, abs=1e-5)
        assert float(gradient) > 0
        assert re.fullmatch(
            {"single": r"\w{8}", "ddp": r"\w{8} on all ranks", "fsdp": r"\w{8} \w{8}"}[strategy], digests
        )


def test_replicas_that_differ_are_named(tmp_path):
    settings = settings_for(2, {"strategy": "ddp"}, train=TRAIN)
    settings["log"] = settings["log"] | {"probe_every_epochs": 2}
    run_ranks(2, trained, settings, tmp_path, True)
    heads, rows = table_of(tmp_path)
    assert "warning" not in heads[0]
    assert re.match(
        r"warning: probe after epoch 4: ranks 0 and 1 differ in \S+; \d of \d parameter tensors differ", heads[1]
    )
    assert re.fullmatch(r"(\w{8}) (?!\1)\w{8}", rows[-1][-1])
