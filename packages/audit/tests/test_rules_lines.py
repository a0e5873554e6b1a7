"""Lines that findings point at: the cause's, and not that where the fault was noticed. And some rules of their own."""

import itertools
import textwrap

import pytest

from lockstep_audit.rules import sources
from packages.audit.tests.made_events import Script, at, dealt, parts
from packages.audit.tests.test_rules_gradients import parted, together


def line(script, id):
    (finding,) = script.found(id)
    return finding.where.line


def written(folder, text):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_layers_that_were_added_after_the_wrapping_are_named_there():
    added = {"at": at(28), "model": 0, "names": ["weight"], "added": ["weight"]}
    (finding,) = parted(script=Script().add("unfrozen", **added)).found("LS203")
    assert (finding.where.line, finding.cause[:25]) == (5, "weight joined the model a")


def test_unfrozen_parameters_without_an_optimizer_are_named_where_replicas_do_not_part():
    told = {"at": at(28), "model": 0, "names": ["weight"]}
    assert line(together(script=Script().add("unfrozen", unowned=["weight"], **told)), "LS203") == 28
    assert together(script=Script().add("unfrozen", **told)).errors() == set()


FREEZES = """\
class Net(Module):
    def __init__(self):
        for p in self.encoder.parameters():
            p.requires_grad = False
        self.head.weight.requires_grad = True
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            for p in self.encoder.parameters():
                p.requires_grad = True
net = Net()
net.head.bias.requires_grad = True
trainer.fit(net)
"""


@pytest.mark.parametrize(
    ("text", "wrapped", "expected"),
    [
        (FREEZES, 12, 9),
        ("def main():\n  a.requires_grad = False\n  b = DDP(a)\n  for p in b:\n    p.requires_grad = on(e)\n", 3, 5),
        ("def thaw(p):\n  p.requires_grad = True\nmodel = DDP(net)\nthaw(p)\nq.requires_grad = True\n", 3, None),
        ("def build(p):\n  net.requires_grad_(False)\n  p.requires_grad = True\nmodel = DDP(net)\n", 4, None),
        ("def put(p, on):\n  p.requires_grad = on\nput(p, False)\nmodel = DDP(net)\nput(p, True)\n", 4, 5),
        ("model = DDP(net)\nhead.requires_grad_(True)\nfor p in q:\n  p.requires_grad = True\n", 1, 4),
        ("p.requires_grad = True\nmodel = DDP(net)\nq.requires_grad = False\n", 2, None),
    ],
    ids=["method", "same function", "two places", "a helper that freezes", "a flag", "a known call", "before"],
)
def test_the_line_that_sets_requires_grad_is_found_in_the_text(tmp_path, text, wrapped, expected):
    path = written(tmp_path, text)
    assert sources.unfreezes(path, wrapped) == expected
    for unowned in (None, ["weight"]):
        script = Script(how=None).add("wrap", at=[path, wrapped, "main"], model=0, how="ddp", parameters=2, trainable=2)
        script.add("unfrozen", at=at(75), model=0, names=["weight"], at_step=True, unowned=unowned)
        assert line((together if unowned else parted)(script=script), "LS203") == (expected or 75)


def test_models_that_begin_unequal_without_a_wrapper_are_named_where_they_were_made():
    def trained(initial, made=None):
        script = parted(script=Script(how=None).add("hand_reduce", at=at(23), op="SUM", parameters=2, divided=True))
        for event in script.events:
            told = {"step": {"gradients": {"weight": "g", "bias": "b"}}}
            told["optimizer"] = {"initial": {"weight": initial(event["rank"]), "bias": "b"}, "unwrapped_from": made}
            event |= told.get(event["kind"], {})
        return script

    assert line(trained(str, made=[at(6)]), "LS201") == 6
    assert line(trained(str), "LS201") == 7  # of the optimizer
    assert line(trained(lambda rank: "same", made=[at(6)]), "LS201") == 30


def test_a_step_without_exchange_is_named_where_the_script_calls_no_sync_or_makes_the_optimizer():
    def unsynced(by_user, prepared=None):
        script = parted(synced=False)
        for event in script.events:
            event |= {"prepared": prepared} if event["kind"] == "optimizer" else {}
            for each in event.get("backwards", []):
                each |= {"unsynced_at": at(19), "unsynced_by_user": by_user}
        return script

    assert line(unsynced(True), "LS204") == 19
    assert line(unsynced(False), "LS204") == 7  # Accelerate calls no_sync, and does not know the optimizer
    assert line(unsynced(False, prepared=True), "LS204") == 25


def test_replicas_that_part_between_steps_that_were_looked_at_are_found_at_the_end():
    def ended(digest):
        script = Script().optimizer().step().step(sampled=False, model=0)
        return script.exit(parameters=lambda rank: {"0": {"weight": digest(rank), "bias": "b"}})

    assert line(ended(str), "LS201") == 30
    assert ended(lambda rank: "same").errors() == set()


def test_an_all_reduce_of_the_script_that_leaves_gradients_unequal_is_named():
    script = Script(how=None).add("hand_reduce", at=at(23), op="SUM", parameters=1, divided=True)
    assert line(parted(script=script), "LS201") == 23


def test_copies_are_named_where_they_were_made_or_are_changed(tmp_path):
    path = written(tmp_path, "for batch in batches:\n    step()\n    if rank == 0:\n        ema.update(net)\n")

    def copied(before, changes, is_early=True):
        script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", parameters=2, trainable=2, before=before)
        told = {"class": "Net", "at": [path, 9, "main"], "made_from": [[path, 1, "main"]], "is_early": is_early}
        return script.optimizer().exit(
            copies=lambda rank: {"0": {**told, "digest": str(rank), "changes": changes(rank)}}
        )

    assert line(copied(str, lambda rank: 5), "LS214") == 1
    assert line(copied("same", lambda rank: 5 - 5 * rank), "LS214") == 4
    assert line(copied("same", lambda rank: 5), "LS214") == 9


def test_a_sampler_of_the_scripts_own_is_named_where_it_was_made():
    def shares(begin):
        def mine(rank):
            return [[number, number + 1] for number in range(rank * begin, rank * begin + 16, 2)]

        return Script().optimizer().epoch(mine, sampler_at=at(9), distributed=dealt(), dataset_size=32)

    assert line(shares(8), "LS108") == 9
    assert shares(16).found("LS108") == []


def test_a_loader_that_a_framework_reads_is_named_where_it_was_made():
    script = Script()
    for epoch in range(2):
        script.epoch(parts(), epoch=epoch, distributed=dealt(), by_framework=True)
    assert line(script, "LS102") == 10


def test_labels_without_the_offset_of_the_rank_are_named():
    def labels(first):
        return Script().optimizer().add("labels", at=at(41), first=first, rows=32).step()

    assert line(labels(0), "LS215") == 41
    assert labels(lambda rank: 32 * rank).errors() == set()


def test_a_gather_without_gradients_has_the_remedy_of_its_framework():
    (finding,) = Script().add("gathered", at=at(31), remedy="all_gather(..., sync_grads=True)").found("LS216")
    assert (finding.where.line, finding.remedy.partition(", or")[0]) == (31, "all_gather(..., sync_grads=True)")
    (finding,) = Script().add("gathered", at=at(31)).found("LS216")
    assert finding.remedy.startswith("torch.distributed.nn.functional.all_gather, or")


def test_processes_that_train_the_same_alone_are_named():
    def alone(script=None, norm=1.5):
        return (script or Script(how=None)).optimizer().step(gradient_norm=norm, hyperparameters=[{"lr": 0.1}])

    assert line(alone(), "LS506") == 30
    assert alone(norm=lambda rank: 1.5 + rank).errors() == set()  # each trains something else
    assert alone(Script(how=None).add("group", name="0", ranks=[0, 1])).errors() == set()
    assert alone(Script(world=1, how=None)).errors() == set()


def test_buffers_that_part_are_a_warning_where_nobody_exchanges_them():
    def ended(digest, synced=False):
        script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", buffers=1, trainable=2, synced=synced)
        return script.exit(buffers=lambda rank: {"0": {"codebook": digest(rank)}})

    assert line(ended(str), "LS606") == 5
    assert ended(str, synced=True).found("LS606") == ended(lambda rank: "same").found("LS606") == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("self.sums.mul_(0.9).add_(new)", True),
        ("self.sums.data.lerp_(new, 0.1)", True),
        ("self.sums = 0.9 * self.sums + new", True),
        ("ema_(self.sums, new)", True),
        ("self.sums[start:end] = new", True),
        ("self.sums.copy_(new)", False),
        ("self.sums[:end] = new", False),
        ("self.sums = new.sums()", False),
        ("print(self.sums)", False),
    ],
)
def test_buffers_that_ddp_overwrites_are_named_where_a_layer_adds_to_them(tmp_path, line, is_found):
    (tmp_path / "layers.py").write_text(f"def forward(self, new):\n    {line}\n")

    def trained(numbers=(0.0, 1.0), name="sums", size=8, steps=2):
        script = Script().optimizer()
        for _ in range(steps):
            told = {"files": {name: [str(tmp_path / "layers.py")]}, "classes": {name: "Layer"}}
            script.step().add("own_buffers", model=0, sums=lambda rank: {name: [numbers[rank], 2.0, size]}, **told)
        return [(finding.where.line, finding.step) for finding in script.found("LS606")]

    assert trained() == ([(2, 1)] if is_found else [])
    assert trained(numbers=(1.0, 1.000001)) == trained(steps=1) == trained(name="running_sums") == []
    assert bool(trained(size=1)) == (is_found and ("mul" in line or "lerp" in line or "*" in line))  # else a counter


def test_weights_that_some_ranks_load_before_fsdp_are_named():
    def loaded(ranks, between=None, how="fsdp2"):
        script = Script(how=None)
        for rank in ranks:
            script.add("state", rank, at=at(50), what="model", names_digest="n")
        if between:
            script.add("collective", at=at(52), op=between)
        return script.add("wrap", at=at(54), model=0, how=how, names_digest="n", trainable=2)

    assert line(loaded([0]), "LS708") == 50
    right = [loaded([0, 1]), loaded([0], "broadcast"), loaded([0], "broadcast_object_list"), loaded([0], how="ddp")]
    assert all(script.found("LS708") == [] for script in right)


def test_a_quotient_of_each_rank_is_named_at_the_call_that_gives_it_away():
    def reduced(by, op="SUM"):
        told = {"op": "all_reduce", "reduce_op": op, "value": 0.4, "given_at": at(37)}
        return Script().add("collective", at=at(25), ratio_of=by, **told)

    assert line(reduced(lambda rank: 12.0 - rank), "LS604") == 37
    assert reduced(12.0).found("LS604") == reduced(lambda rank: 12.0 - rank, "MAX").found("LS604") == []


def test_ranks_that_hang_are_named_where_their_ways_part():
    def hung(first, second):
        stacks = [[[at(1)[0], 27, "test"], at(first)], [at(second)]]
        stuck = {"at": lambda rank: stacks[rank][0], "stacks": lambda rank: {"MainThread": stacks[rank]}}
        made = {"collectives": lambda rank: [{"group": "0", "sequence": 9 - rank, "name": "broadcast"}]}
        return Script().step().add("stuck", since_s=9.0, **stuck, **made)

    assert line(hung(51, 52), "LS502") == 51


def test_a_rank_that_went_on_and_failed_later_was_not_stuck():
    def failed(message):
        error = {"type": "RuntimeError", "message": message}
        return Script().step().add("stuck", at=at(40), since_s=9.0, stacks={}).exit(code=1, error=error)

    assert failed("no such file").found("LS504") == []
    assert failed("connection closed by peer").found("LS504") != []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("names = list(set(words))", [1]),
        ("words = set()\nfor word in words:\n    pass", [2]),
        ("import os\nfiles = {name: n for n, name in enumerate(os.listdir('.'))}", [2]),
        ("names = sorted(set(words))", []),
        ("n = len(set(words))", []),
        ("not python (", []),
    ],
)
def test_orders_of_sets_and_folders_are_found_in_the_text(tmp_path, text, lines):
    path = written(tmp_path, text)
    assert [row for _, row in sources.unordered([path, None])] == lines


def test_ways_out_of_a_loop_and_conditions_are_found_in_the_text(tmp_path):
    text = """\
    for epoch in epochs:
        for batch in batches:
            loss.backward()
            if skips(loss):
                skipped += 1
            else:
                optimizer.step()
            for part in batch:
                break
        if stops(epoch):
            break
    dist.barrier()
    shown = outputs[: len(loader.dataset) - seen]
    """
    path = written(tmp_path, text)
    assert sources.ways_out(path, inside=3, outside=12) == [11]
    assert sources.condition(path, before=3, after=7) == 4
    assert sources.condition(path, before=1, after=3) is None
    assert sources.cuts(path)
    assert not sources.cuts(str(tmp_path / "missing.py"))


def test_a_loss_divided_by_the_labels_of_all_ranks_is_named_where_it_is_divided(tmp_path):
    path = written(
        tmp_path, "losses = f(x,\n           reduction='sum')\ncount = g(y)\nloss = losses / count\nloss.backward()\n"
    )
    script = Script().optimizer()
    for rank, valid in itertools.product(range(2), (10, 12)):
        script.step(rank, micro_batches=[{"loader": 0, "batch": 0, "samples": 4, "valid": valid}])
        told = {"at": [path, 5, "main"], "loss_at": [path, 1, "main"]}
        script.events[-1]["backwards"][0] |= {"divisor": 2.0 * valid, "ops": ["DivBackward0", "DivBackward0"], **told}
    assert line(script, "LS211") == 4


def test_a_callback_that_stops_some_ranks_is_named(tmp_path):
    def hung(text, blocked):
        path = written(tmp_path, text)
        sources.nodes.cache_clear()
        entry = {"group": "0", "sequence": 7, "name": "gloo:all_reduce", "dtypes": ["Float"], "state": "scheduled"}
        told = {"since_s": 60.0, "blocked_in": blocked, "moves": False, "stacks": {}}
        told["collectives"] = lambda rank: [entry | {"sizes": [[rank]]}]
        return line(Script().add("stuck", at=[path, 3, "main"], **told), "LS501")

    def apart(rank):
        return "torch._tensor.Tensor.backward" if rank else "torch.distributed.all_gather"

    stops = "if loss < 1:\n    control.should_training_stop = True\ntrainer.train()\n"
    assert hung(stops, apart) == 2
    assert hung(stops, "torch._tensor.Tensor.backward") == hung(stops.replace("True", "False"), apart) == 3


def test_duplicates_that_are_cut_off_by_hand_count_once(tmp_path):
    def evaluated(text):
        script = Script().optimizer()
        path = written(tmp_path, text)
        sources.nodes.cache_clear()
        for loader in range(2):  # made anew for each evaluation
            made = {"at": [path, 1, "main"], "made_at": [path, 1, "main"], "dataset_size": 17, "distributed": dealt()}
            script.add("loader", loader=loader, epoch=0, **made)
            told = {"backwards": 0, "forwards_eval": 3, "is_complete": True, "batches": 3, "samples": 9}
            script.add("loader_end", loader=loader, epoch=0, **told)
        return script.found("LS601")

    assert len(evaluated("truth = torch.cat(parts)")) == 1
    assert evaluated("truth = torch.stack(parts, 1).flatten()[:size]") == []
    assert len(evaluated("truth = torch.cat(parts)[:-1]")) == 1


LOOPS = """\
for batch in batches:
    loss.backward()
    if loss < target:
        break
dist.barrier()
"""


def test_a_rank_that_decides_for_itself_is_named_where_it_does(tmp_path):
    path = written(tmp_path, LOOPS)
    sources.nodes.cache_clear()

    def parted(asked=None, is_complete=False):
        script = Script().optimizer().step().step()
        script.events = [event | {"at": [path, 2, "main"]} for event in script.events]
        if asked is not None:
            script.add("asked", asked, at=at(3), what="should_stop")
        return script.add("loader_end", 0, loader=0, epoch=0, batches=2, backwards=2, is_complete=is_complete)

    def called(script):
        told = {"group": "0", "sequence": 7, "shape": [4], "op": lambda rank: "broadcast" if rank else "barrier"}
        return script.add("collective", at=lambda rank: [path, 2 if rank else 5, "main"], **told)

    def left(script):
        script.add("step", 0, optimizer=0, index=2, at=[path, 5, "main"]).exit(0)
        return script.add("stuck", 1, at=[path, 2, "main"], stacks={}, since_s=9)

    for rule, hung in {"LS501": called, "LS503": left}.items():
        (finding,) = hung(parted(asked=0)).found(rule)
        assert (finding.where.line, "took this branch after 2 steps" in finding.cause) == (3, True)
        assert line(hung(parted()), rule) == 4
        assert line(hung(parted(is_complete=True)), rule) == 5  # its loader was shorter
    assert line(called(parted().add("asked", at=at(3), what="should_stop")), "LS501") == 4  # all ranks asked


def test_a_state_of_a_generator_that_all_ranks_load_is_named(tmp_path):
    path = written(tmp_path, "def load(self, state):\n    self.rng.set_state(state)\nown.bit_generator.state = 3\n")

    def resumed(loaded="a.pt", generators="same", state=None, **keys):
        script = Script().add("load", at=at(30), path=loaded)
        script = script.add("generator", at=at(31), digest=state) if state else script
        told = {"sampler_kind": None, "is_iterable": True, "generators": generators, "defined_in": path}
        script.epoch(lambda rank: [[0, 1], [2, 3]], **told | keys)
        script.events = [event for event in script.events if event["kind"] != "indices"]
        return line(script, "LS101")

    assert [resumed(), resumed(state="same"), resumed(state=str)] == [2, 31, 2]
    own = [resumed(loaded=str), resumed(generators=str), resumed(generators=None), resumed(is_iterable=False)]
    assert own == [10] * 4
    written(tmp_path, "loader = DataLoader(stream)\nself.own.bit_generator.state = 3\n")
    sources.nodes.cache_clear()
    assert resumed() == 2

    def without_loader(state):
        script = Script().add("load", at=at(30), path="a.pt").add("generator", at=at(31), digest=state)
        for number in range(4):
            script.add("inputs", at=at(25), model=0, digest=f"batch {number}")
        return line(script, "LS101")

    assert (without_loader("same"), without_loader(str)) == (31, 25)
