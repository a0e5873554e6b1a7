"""Plans of models that are cut across ranks: the collectives and the bytes of a step, beside those of real ranks."""

import collections
import math

import pytest
from torch import nn

from lockstep.core import loop
from lockstep.core.errors import UsageError
from lockstep.core.parallel import torch_internals
from lockstep.plan import command
from lockstep.plan.estimate import estimate
from lockstep.plan.facts import facts_of
from lockstep.plan.inputs import Setting, World
from lockstep.plan.measure import compare, measure
from lockstep.recipes import config_file
from tests import runs
from tests.mesh import mesh_cases
from tests.mesh.test_mesh import MESHES, sections
from tests.ranks import run_ranks
from tests.selection import mainly

NUMBER = 8  # bytes: the model is in float64


def collectives_of_a_step(given):
    """What torch's flight recorder has of the third step: group, collective, and the numbers of the rank's input."""
    found, step = [], loop.train_step

    def recorded(state, *arguments, **more):
        known = {entry["record_id"] for entry in torch_internals.recorded_collectives()}
        result = step(state, *arguments, **more)
        if state.step == 3:
            found.extend(e for e in torch_internals.recorded_collectives() if e["record_id"] not in known)
        return result

    loop.train_step = recorded
    try:
        mesh_cases.fit(given)
    finally:
        loop.train_step = step
    sizes = [(e["process_group"][1], e["profiling_name"], math.prod(e["input_sizes"][0])) for e in found]
    return [each for each, entry in zip(sizes, found, strict=True) if entry["input_dtypes"] == ["Double"]]


def counted(given, ranks, shape):
    """By group and collective: how many there are in a step, and the bytes of the whole tensors, on the first rank,
    which has most rows.

    The sums of units and of the norm have one number, and a group of one rank sends nothing.
    """
    found = collections.defaultdict(lambda: [0, 0])
    for group, name, size in run_ranks(ranks, collectives_of_a_step, given)[0]:
        group = "tensor" if group == "default_pg" else group.removeprefix("mesh_")  # a tensor group of all ranks
        if size == 1 or shape[group] == 1:
            continue
        gathers = name == "gloo:all_gather"
        kind = "all_gather" if gathers else "reduce_scatter" if group == "shard" else "all_reduce"  # gloo reduces all
        found[group, kind][0] += 1
        found[group, kind][1] += NUMBER * size * (shape[group] if gathers else 1)
    return {key: tuple(values) for key, values in found.items()}


CASES = [(name, accumulate, False) for name in ("1x1x2", "1x2x2", "2x1x2", "2x2x2") for accumulate in (1, 2)]
CASES += [("1x2x2", 1, True), ("each micro-batch", 3, False)]


@pytest.mark.parametrize(("name", "accumulate", "recompute"), mainly([("1x2x2", 2, False)], CASES))
def test_the_collectives_of_a_step_are_those_that_ranks_make(name, accumulate, recompute):
    ranks, parallel = MESHES[name]
    compute = {"compute": {"activation_checkpointing": recompute}}
    given = sections(name, accumulate, train={"steps": 3}, **compute)
    strategy = "hybrid" if "shard_ranks" in parallel else "ddp" if name == "1x1x2" else parallel["strategy"]
    setting = Setting(
        World(ranks, ranks),
        strategy,
        "fp32",
        given["batch"]["micro"],
        accumulate,
        recompute=recompute,
        shard_ranks=parallel.get("shard_ranks"),
        reduce_each_micro_batch=parallel.get("reduce_each_micro_batch", False),
        tensor=2,
    )
    config = config_file.parse(runs.config(**given), needs_task=False)
    facts = facts_of(mesh_cases.Cut(), config, device="cpu", precisions=("fp32",), recompute=(recompute,))
    planned = collections.defaultdict(lambda: (0, 0))
    for each in estimate(facts, setting).communication.traffic:
        if each.group != "all":
            count, size = planned[each.group, each.collective]
            planned[each.group, each.collective] = count + each.count, size + each.bytes
    shape = {"replicate": setting.replicas, "shard": setting.shards, "tensor": 2}
    assert counted(given, ranks, shape) == planned
