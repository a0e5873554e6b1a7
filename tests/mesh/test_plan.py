"""Plans of models that are cut across ranks: the collectives and the bytes of a step, beside those of real ranks."""

import collections
import math

import pytest
import torch
from torch import nn

from lockstep.configs import config_file
from lockstep.core import build
from lockstep.core.errors import UsageError
from lockstep.core.parallel import torch_internals
from lockstep.mesh import alone
from lockstep_lab.plan import command, show
from lockstep_lab.plan.estimate import estimate
from lockstep_lab.plan.facts import facts_of
from lockstep_lab.plan.inputs import Machines, Setting
from lockstep_lab.plan.measure import compare, measure
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from tests import lm_cases, runs
from tests.mesh import mesh_cases
from tests.mesh.test_mesh import MESHES, sections
from tests.ranks import run_ranks
from tests.selection import mainly

NUMBER = 8  # bytes: the model is in float64


def collectives_of_a_step(fit, *arguments):
    """What torch's flight recorder has of the third step: group, collective, and the numbers of the rank's input."""
    found, step = [], build.train_step

    def recorded(state, *arguments, **more):
        known = {entry["record_id"] for entry in torch_internals.recorded_collectives()}
        result = step(state, *arguments, **more)
        if state.step == 3:
            found.extend(e for e in torch_internals.recorded_collectives() if e["record_id"] not in known)
        return result

    build.train_step = recorded
    try:
        fit(*arguments)
    finally:
        build.train_step = step
    sizes = [(e["process_group"][1], e["profiling_name"], math.prod(e["input_sizes"][0])) for e in found]
    return [each for each, entry in zip(sizes, found, strict=True) if entry["input_dtypes"] == ["Double"]]


def counted(ranks, shape, *training):
    """By group and collective: how many there are in a step, and the bytes of the whole tensors, on the first rank,
    which has most rows.

    The sums of units and of the norm have one number, and a group of one rank sends nothing.
    """
    found = collections.defaultdict(lambda: [0, 0])
    for group, name, size in run_ranks(ranks, collectives_of_a_step, *training)[0]:
        group = "tensor" if group == "default_pg" else group.removeprefix("mesh_")  # a tensor group of all ranks
        if size == 1 or shape[group] == 1:
            continue
        gathers = name == "gloo:all_gather"
        kind = "all_gather" if gathers else "reduce_scatter" if group == "shard" else "all_reduce"  # gloo reduces all
        found[group, kind][0] += 1
        found[group, kind][1] += NUMBER * size * (shape[group] if gathers else 1)
    return {key: tuple(values) for key, values in found.items()}


def planned(facts, setting):
    """As `counted`, from the plan."""
    found = collections.defaultdict(lambda: (0, 0))
    for each in estimate(facts, setting).communication.traffic:
        if each.group != "all":
            kind = "all_reduce" if each.group == "tensor" and "reduce" in each.collective else each.collective
            count, size = found[each.group, kind]  # of a tensor group: gloo reduces all in both
            found[each.group, kind] = count + each.times, size + each.bytes
    return found


CASES = [(name, accumulate, False) for name in ("1x1x2", "1x2x2", "2x1x2", "2x2x2") for accumulate in (1, 2)]
CASES += [("1x2x2", 1, True), ("each micro-batch", 3, False)]
CASES = [(*case, plan) for case in CASES for plan in ("PLAN", "BY_TOKENS")]


@pytest.mark.parametrize(
    ("name", "accumulate", "recompute", "plan"),
    mainly([("1x1x2", 2, False, "PLAN")], CASES),
)
def test_the_collectives_of_a_step_are_those_that_ranks_make(name, accumulate, recompute, plan):
    options = {"plan": getattr(mesh_cases, plan)}
    ranks, parallel = MESHES[name]
    compute = {"compute": {"activation_checkpointing": recompute}}
    given = sections(name, accumulate, train={"steps": 3}, **compute)
    strategy = "hybrid" if "shard_ranks" in parallel else "ddp" if name == "1x1x2" else parallel["strategy"]
    setting = Setting(
        Machines(ranks, ranks),
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
    facts = facts_of(mesh_cases.Cut(**options), config, device="cpu", precisions=("fp32",), recompute=(recompute,))
    shape = {"replicate": setting.replicas, "shard": setting.shards, "tensor": 2}
    assert counted(ranks, shape, mesh_cases.fit, given, options) == planned(facts, setting)


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{}, {"cut_tokens": True}])
def test_the_collectives_of_a_language_model_are_those_that_ranks_make(tmp_path, more):
    options = {"train": lm_cases.corpus(tmp_path), **lm_cases.SMALL, "loss_chunk": 20, **more}
    optim = {"name": "SGD", "weight_decay": 0.0}
    given = runs.config(batch={"global": 4, "micro": 2}, train={"steps": 3}, parallel={"tensor": 2}, optim=optim)
    task = ComparableTask(lm_cases.small_task(**options), TaskChanges(float64=True))
    config = config_file.parse(given, needs_task=False)
    facts = facts_of(task, config, device="cpu", precisions=("fp32",), recompute=(False,))
    found = counted(2, {"replicate": 1, "shard": 1, "tensor": 2}, lm_cases.train, options, given)
    assert found == planned(facts, Setting(Machines(2, 2), "ddp", "fp32", 2, 2, tensor=2))


# ---- bytes


def parsed(file=mesh_cases.__file__, kind="Cut", **given):
    return config_file.parse(runs.config(task={"kind": f"{file}:{kind}"}, **given))


def measured(given, kind):
    return measure(parsed(kind=kind, **given))


@pytest.mark.exhaustive  # at a load of 40 on two cores, the state of the optimizer once measured 3 % less
@pytest.mark.parametrize("kind", ["Cut", "ByTokens"])
@pytest.mark.parametrize("name", ["1x1x2", "1x2x2", "2x1x2"])
def test_a_rank_holds_the_bytes_that_the_plan_tells(name, kind):
    given = sections(name)
    # A thread of gloo may free an activation late, which can only add to what is kept: so the less of two counts.
    tries = (run_ranks(MESHES[name][0], measured, given, kind)[0] for _ in range(2))
    found = min(tries, key=lambda each: each.activations_bytes)
    setting, rows = compare(parsed(kind=kind, **given), found, 0.4)
    assert (setting.tensor, setting.data_ranks) == (2, found.world // 2)
    off = {row.part: row.off for row in rows}
    assert [off[part] for part in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert off["kept by a forward pass"] == pytest.approx(0, abs=0.02)
    assert off["operations of a sample"] == 0


def test_layers_are_cut_and_activations_have_the_sizes_of_a_rank():
    """Of each style, the part that one of two ranks holds, what it computes, and what it would exchange."""
    noted = []
    model = nn.Sequential(
        nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 10)
    ).double()
    styles = ("embedding_rowwise", "colwise", "rowwise", "rowwise_split_input", "colwise_gather_output")
    plan = {str(number): style for number, style in enumerate(styles)}
    assert alone.part_of(model, plan, 2, lambda *each: noted.append(each)) == []
    assert [tuple(layer.weight.shape) for layer in model] == [(4, 4), (3, 4), (4, 3), (4, 2), (5, 4)]
    assert [tuple(layer.bias.shape) for layer in model[1:]] == [(3,), (4,), (4,), (5,)]
    hidden = model(torch.tensor([[0, 7, 3]]))
    assert hidden.shape == (1, 3, 10)
    wide, last = 3 * 4 * NUMBER, 3 * 10 * NUMBER
    assert noted == [("all_reduce", wide), ("all_reduce", wide), ("all_reduce", wide), ("all_gather", last)]
    noted.clear()
    hidden.sum().backward()  # the embedding's gradient needs no exchange
    assert noted == [("all_reduce", wide), ("all_gather", wide), ("all_reduce", wide)]


# ---- what is planned

GIVEN = {"batch": {"global": 4}, "train": {"steps": 1}}


def plan(bytes_of_a_gpu, gpus=4, per_node=4, precision="fp32", **given):
    world = Machines(gpus, per_node, memory_bytes=bytes_of_a_gpu)
    return command.plan_of(parsed(**GIVEN | given), world, precisions=[precision], reserve=0.0)


def test_a_cut_is_proposed_where_nothing_else_fits():
    """Between the least peak without a cut, and with one."""
    least = min(o.estimate.memory.peak_bytes for o in plan(10**9).options if o.estimate and "offload" not in o.name)
    assert "tensor" not in plan(least).recommended.name
    found = plan(least - 1)
    assert found.recommended.name.startswith(("ddp + tensor 2", "fsdp + tensor 2"))
    assert found.recommended.estimate.memory.peak_bytes < least
    assert "parallel.tensor=2" in found.keys
    assert "with parallel.tensor=1 nothing fits" in found.reason
    assert sum(p.elements for p in found.facts.parameters) == found.facts.elements  # those of the whole model
    lines = show.text(found)
    assert "tensor groups" in lines
    assert any(line.split()[:2] == ["tensor", "all_reduce"] and "in a machine" in line for line in lines.splitlines())
    values = show.as_json(found)
    assert values["recommended"] == found.recommended.name
    assert values["options"][-1]["estimate"]["communication"]["traffic"][-1][:3] == ("tensor", "all_reduce", 1)
    alone_fits = plan(10**9, gpus=1, per_node=1, parallel={"tensor": 2})
    assert alone_fits.recommended.name == "single, fp32"


WITHOUT = """
from tests.mesh import mesh_cases


class Cut(mesh_cases.Cut):
    tensor_plan = lambda self: None
"""


def test_a_model_without_a_plan_and_groups_on_two_machines_are_named(tmp_path):
    (tmp_path / "without.py").write_text(WITHOUT)
    found = plan(1, file=tmp_path / "without.py")
    assert found.recommended is None
    assert "parallel.tensor=2 was not tried: " in found.facts.notes[-1]
    assert "there is no plan for sharding Model" in found.facts.notes[-1]
    with pytest.raises(UsageError, match="2 ranks of a machine cannot be divided into tensor groups of 4"):
        plan(10**9, gpus=4, per_node=2, parallel={"tensor": 4})
    with pytest.raises(UsageError, match=r"compute\.compile"):
        plan(10**9, parallel={"tensor": 2}, compute={"compile": "model"})


@pytest.mark.exhaustive  # as the test above: a note, and a reason where nothing fits
def test_what_does_not_fit_however_it_is_cut_and_what_is_not_cut_are_named():
    assert plan(1).facts.notes[-1] == "parallel.tensor=4 does not fit either"
    in_fp16 = plan(10**9, precision="fp16", parallel={"tensor": 2})
    assert in_fp16.recommended is None
    assert "tensor parallelism supports neither fp16" in in_fp16.reason
