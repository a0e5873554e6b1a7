"""Rules on data: a fault, its right twin, and odd scripts that are right."""

import pytest

from packages.audit.tests.made_events import FILE, Script, at, dealt, parts, whole


def trained(indices, script=None, **keys):
    return (script or Script()).optimizer().epoch(indices, **keys)


def test_the_same_samples_on_all_ranks_are_named_with_loader_and_indices():
    script = trained(whole())
    (finding,) = script.found("LS101")
    assert (finding.where, finding.ranks) == ((FILE, 10, "main"), (0, 1))
    assert "0, 7, 14, 5, 12" in finding.evidence
    assert "no DistributedSampler" in finding.cause


def own_shards(rank, batch):
    return f"{rank} {batch}"


@pytest.mark.parametrize(
    "script",
    [
        trained(parts(), distributed=dealt()),
        trained(whole(), digest=own_shards),  # each rank has files of its own, and the same numbers
        trained(whole(), digest=own_shards, subset=str),
        trained(whole(), script=Script(how=None)),  # nothing is averaged: ranks train alone
        trained(whole(), train=False),  # an evaluation
        trained(lambda rank: [[0]] * 4),  # one sample, again and again
        trained(lambda rank: [], is_iterable=True),
    ],
    ids=["dealt", "own files", "own subsets", "alone", "evaluation", "one sample", "nothing"],
)
def test_scripts_that_are_right_do_not_train_on_the_same_samples(script):
    assert script.errors() == set()


def test_two_ranks_of_four_that_share_samples_are_named():
    script = trained(lambda rank: parts(world=2)(rank % 2), script=Script(4), distributed=dealt(2))
    assert script.found("LS101")[0].ranks == (0, 1, 2, 3)
    other = trained(lambda rank: parts(world=3)(min(rank, 2)), script=Script(4))
    assert other.found("LS101")[0].ranks == (2, 3)


def test_ranks_of_one_tensor_parallel_group_have_the_same_samples():
    script = Script(4, how=None).add(
        "wrap", at=at(5), model=0, how="fsdp2", ranks=lambda rank: [rank % 2, rank % 2 + 2]
    )
    assert trained(lambda rank: parts()(rank // 2), script=script, distributed=dealt()).errors() == set()


def test_labels_that_are_equal_show_the_same_samples_under_other_augmentation():
    def both(labels):
        script = Script().optimizer().epoch(whole(), digest=own_shards)
        for event in script.events:
            if event["kind"] == "batch":
                label = labels(event["rank"], event["batch"])
                event["digests"] = [f"picture {event['rank']} {event['batch']}", f"label {label}"]
        return script.found("LS101")

    assert both(lambda rank, batch: batch)
    assert not both(lambda rank, batch: f"{rank} {batch}")
    assert not both(lambda rank, batch: "a constant mask")


def test_iterable_data_that_every_rank_reads_whole_are_the_same():
    script = Script().optimizer().epoch(parts(), is_iterable=True, digest=lambda rank, batch: str(batch[0] // 4))
    for event in script.events:
        if event["kind"] == "batch":
            event["digest"] = str(event["batch"])
    script.events = [event for event in script.events if event["kind"] != "indices"]
    (finding,) = script.found("LS101")
    assert "IterableDataset" in finding.cause


def test_a_second_loader_with_data_of_its_own_makes_a_shared_batch_right():
    """Such as a fixed set of anchors, which every rank compares its own samples with."""
    script = Script().optimizer().epoch(parts(), distributed=dealt())
    script.events[-1]["step"] = script.events[-2]["step"] = 99
    script.epoch(whole(), number=1)
    assert script.found("LS101") == []


def epochs(script, orders, calls=(), **keys):
    script.optimizer()
    for number, order in enumerate(orders):
        for epoch in calls[number : number + 1]:
            script.add("set_epoch", sampler=3, epoch=epoch)
        script.epoch(order, epoch=number, sampler=3, distributed=dealt(**keys, epoch=(*calls, 0)[0]))
    return script


def test_two_epochs_in_the_same_order_have_no_set_epoch():
    (finding,) = epochs(Script(), [parts(), parts()]).found("LS102")
    assert finding.where.line == 20
    assert "never called set_epoch" in finding.cause
    constant = epochs(Script(), [parts(), parts()], calls=(0, 0))
    assert "with the same number" in constant.found("LS102")[0].cause
    seeded = Script().optimizer().epoch(whole()).epoch(whole(), epoch=1)
    assert "the same seed" in seeded.found("LS102")[0].cause


@pytest.mark.parametrize(
    "script",
    [
        epochs(Script(), [parts(), parts(shift=3)]),
        epochs(Script(), [parts(), parts()], shuffle=False),
        epochs(Script(), [parts(), parts()], calls=(0,)),  # a loader that is read twice in an epoch, as in a GAN
        epochs(Script(), [parts()]),
        epochs(Script(), [parts(size=4, batch=1), parts(size=4, batch=1)]),  # too few to tell
        Script().optimizer().epoch(parts(), train=False).epoch(parts(), train=False, epoch=1),
    ],
    ids=["other order", "no shuffle", "twice in an epoch", "one epoch", "few", "evaluation"],
)
def test_scripts_that_are_right_do_not_lack_set_epoch(script):
    assert script.found("LS102") == []


def split(digest, script=None, **keys):
    script = (script or Script()).add("split", at=at(8), lengths=[64, 16], digest=digest)
    return script.optimizer().epoch(parts(), **keys)


def test_splits_that_differ_by_rank_are_named():
    (finding,) = split(lambda rank: str(rank), distributed=dealt()).found("LS103")
    assert finding.where.line == 8
    subsets = Script().optimizer().epoch(parts(), distributed=dealt(), subset=lambda rank: str(rank))
    assert subsets.found("LS103")[0].where.line == 10
    both = {"distributed": dealt(), "subset": str, "dataset_at": at(8)}  # the parts for training and validation
    (finding,) = Script().optimizer().epoch(parts(), **both).epoch(parts(), number=1, **both).found("LS103")
    assert finding.where.line == 8
    assert split("equal", distributed=dealt()).errors() == set()
    assert split(lambda rank: str(rank)).errors() == set()  # each rank splits data of its own
    nodes = Script(4).optimizer().epoch(parts(), distributed=dealt(2), subset=lambda rank: str(rank // 2))
    assert nodes.found("LS103") == []  # a part of the data for each node


def uneven(end=None, script=None, **keys):
    sizes = {"dataset_size": lambda rank: 16 + 4 * rank}
    return trained(lambda rank: whole(16 + 4 * rank)(rank), script=script, digest=own_shards, end=end, **(sizes | keys))


def test_loaders_of_different_length_are_named():
    (finding,) = uneven().found("LS104")
    assert finding.where.line == 10
    assert "len(loader) is 8 on rank 0, 10 on rank 1" in finding.evidence
    assert "its own size of data set" in finding.cause
    streams = uneven(batches=None, is_iterable=True)
    assert "batches in this epoch: 8 on rank 0, 10 on rank 1" in streams.found("LS104")[0].evidence
    hangs = uneven()
    hangs.events = [e for e in hangs.events if not (e["rank"] == 1 and e["kind"] == "loader_end")]
    assert hangs.found("LS104")


@pytest.mark.parametrize(
    "script",
    [
        uneven(end={"joined": True}),
        uneven().exit(joined=True),
        uneven(end={"backwards": 8}),  # all ranks stop at the shortest
        uneven(script=Script(how=None)),
        trained(parts(), distributed=dealt()),
    ],
    ids=["join", "join in a last epoch", "shortest", "alone", "even"],
)
def test_loaders_that_are_right_are_not_uneven(script):
    assert script.found("LS104") == []


def test_uneven_batches_without_any_exchange_are_right():
    """Local SGD under no_sync: nothing waits for a batch of another rank."""
    script = uneven()
    for event in script.events:
        for each in event.get("backwards", []) if event["kind"] == "step" else []:
            each["synced"] = False
    assert script.found("LS104") == []


def test_data_sets_that_are_not_the_same_are_named():
    (finding,) = trained(parts(), distributed=dealt(), dataset_size=lambda rank: 64 + rank).found("LS105")
    assert "64 samples on rank 0, 65 samples on rank 1" in finding.evidence

    def probed(samples):
        return trained(parts(), distributed=dealt()).add("probe", loader=0, dataset_size=64, samples=samples)

    def other(rank):
        return {"0": [f"picture {rank}", [rank]], "9": [f"another {rank}", [1]]}

    assert "in all fields" in probed(other).found("LS105")[0].evidence
    right = [
        lambda rank: {"0": ["picture", [0]], "9": ["another", [1]]},
        lambda rank: {"0": [f"augmented {rank}", [0]], "9": [f"augmented {rank}", [1]]},  # labels stay
        lambda rank: {"0": [None, [0]], "9": [None, [1]]},  # random
    ]
    assert [probed(each).found("LS105") for each in right] == [[], [], []]
    assert uneven().found("LS105") == []  # files of its own on each rank, and no sampler that deals


def test_the_call_that_took_other_samples_is_named_once_for_all_loaders():
    def taken(digest, lengths=(64,), line=8):
        told = {"by": "train_test_split", "digest": digest, "lengths": lengths}
        script = Script().add("split", at=at(line - 1), **{**told, "digest": "same"}).add("split", at=at(line), **told)
        for number in range(2):
            script.optimizer().epoch(parts(), number=number, distributed=dealt())
            samples = {"samples": lambda rank: {str(n): [f"picture {rank} {n}", [rank]] for n in range(2)}}
            script.add("probe", loader=number, dataset_size=64, **samples)
        return script

    (finding,) = taken(str).found("LS105")
    assert (finding.where.line, finding.cause[:40]) == (8, "train_test_split() took different sample")
    assert taken(str).found("LS103") == []  # a draw alone is no fault: the contents show it
    assert taken(str, lengths=[9]).found("LS105")[0].where.line == 8  # the only one that differs
    two = taken(str, lengths=[9]).add("split", at=at(9), by="Subset", digest=str, lengths=[9])
    own = taken(str, lengths=lambda rank: [64 + rank])  # of data that differ themselves
    assert [each.found("LS105")[0].where.line for each in (two, own, taken("same"))] == [10, 10, 10]


def test_every_rank_that_reads_all_data_in_its_own_order_is_a_warning():
    (finding,) = trained(whole(shift=lambda rank: rank), dataset_size=16).found("LS106")
    assert "all 16 indices" in finding.evidence
    right = [
        trained(parts(), distributed=dealt(), dataset_size=16),
        trained(whole(shift=lambda rank: rank), dataset_size=16, subset=lambda rank: str(rank)),
        trained(lambda rank: [[0, 1, 1], [rank, 5, 5]] * 4, dataset_size=16),  # drawn with replacement
        trained(whole(shift=lambda rank: rank), dataset_size=16, script=Script(how=None)),
    ]
    assert not any(script.found("LS106") for script in right)
