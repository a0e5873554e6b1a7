"""Rules on how data are dealt to ranks and workers, and on noise."""

import pytest

from lockstep_audit.rules import flows, sources
from packages.audit.tests.made_events import Script, at, dealt, parts, whole


def trained(indices=None, **keys):
    return Script().optimizer().epoch(indices or parts(), **keys)


def test_data_that_are_dealt_twice_are_a_warning():
    (finding,) = trained(distributed=dealt(), shared_twice=True).found("LS107")
    assert finding.where.line == 10
    assert trained(distributed=dealt()).found("LS107") == []


def test_streams_of_ranks_that_a_shard_deals_again_are_a_warning():
    def streams(samples):
        script = Script().optimizer().epoch(parts(), is_iterable=True)
        return script.add("stream", at=at(12), shards=2, samples=samples)

    (finding,) = streams(lambda rank: [[[rank, 7 + rank], [rank]], [[5 + rank, 3], [1]]]).found("LS107")
    assert finding.ranks == (0, 1)
    clicks = streams(lambda rank: [[[rank, n], ["no", "yes"][(n >> rank) % 2]] for n in range(8)])
    assert len(clicks.found("LS107")) == 1  # labels that are no whole numbers agree at times
    right = [
        lambda rank: [[f"picture {rank} {n}", ["no", "yes"][n % 2]] for n in range(8)],
        lambda rank: [[[4, 7], [0]], [[5, 3], [1]]],
        lambda rank: [[f"picture {rank}", [0]], [f"other {rank}", [1]]],  # augmented: labels are equal
        lambda rank: [[f"noise {rank}"], [f"more {rank}"]],  # nothing is known but that it differs
        lambda rank: [None, None],
    ]
    assert [streams(each).found("LS107") for each in right] == [[], [], [], [], []]


def test_streams_of_ranks_of_which_one_is_read_for_all_are_a_warning():
    def dispatched(parts):
        return Script().optimizer().add("dispatched", at=at(12), parts=parts).found("LS107")

    (finding,) = dispatched(lambda rank: {"files": [f"{rank}a", f"{rank}b"], "seed": 1})
    assert (finding.where.line, finding.ranks) == (12, (0, 1))
    assert "`files` of the stream differs by rank" in finding.evidence
    assert len(dispatched(lambda rank: {"part": rank, "of": 2})) == 1
    right = [
        lambda rank: {"files": ["a", "b"]},
        lambda rank: {"files": ["a", f"b{rank}"]},  # an order or a choice of its own
        lambda rank: {"seed": rank, "files": ["a"]},
        lambda rank: {} if rank else {"files": ["a"]},  # the others have an empty list
    ]
    assert [dispatched(each) for each in right] == [[], [], [], []]


def test_a_stream_that_asks_for_its_rank_while_one_rank_reads_it_for_all_is_a_warning():
    def asked(**asks):
        told = lambda rank: {n: [v(rank) if callable(v) else v, at(30)] for n, v in asks.items()}  # noqa: E731
        script = Script().optimizer().add("dispatched", at=at(12), parts={}, asks=told)
        return [(found.where.line, found.ranks) for found in script.found("LS107")]

    mine = {"RANK": lambda rank: rank}
    assert asked(**mine, WORLD=2) == asked(get_rank="rank", get_world_size="ranks") == [(30, (0, 1))]
    assert [asked(**mine, WINDOW=2), asked(**mine, WORLD=4), asked(RANK=0, WORLD=2), asked(WORLD=2)] == [[]] * 4


def drawn(rank):
    """Half of 64 indices, in an order of the rank's own."""
    order = sorted(range(64), key=lambda index: (index * (7 if rank else 11)) % 61)
    return [order[rank::2][first : first + 4] for first in range(0, 32, 4)]


def test_shares_that_overlap_are_named_with_the_seeds():
    (finding,) = trained(drawn, distributed=lambda rank: dealt()(rank) | {"seed": rank}).found("LS108")
    assert "are also on the other rank" in finding.evidence
    assert finding.cause.endswith("the seed of the sampler is 0 on rank 0, 1 on rank 1")
    right = [
        trained(parts(64), distributed=dealt()),
        trained(drawn),  # each rank has files of its own
        trained(drawn, distributed=dealt(), replacement=True),
        trained(drawn, distributed=dealt(), complete=False),
    ]
    assert [script.found("LS108") for script in right] == [[], [], [], []]


def test_a_last_batch_that_is_filled_with_samples_of_the_beginning_is_no_overlap():
    """As Accelerate fills that of the second rank: 150 samples, batches of 16."""

    def filled(rank):
        return [[index % 150 for index in range(first, first + 16)] for first in range(0, 160, 16)][rank::2]

    keys = {"batch_size": 16, "dataset_size": 150}
    assert trained(filled, distributed=dealt(even_batches=True), **keys).found("LS108") == []
    assert len(trained(filled, distributed=dealt(), **keys).found("LS108")) == 1
    shuffled = lambda rank: [drawn(rank)[n] + drawn(rank)[n + 1] for n in range(0, 8, 2)]  # noqa: E731
    assert len(trained(shuffled, distributed=dealt(even_batches=True), batch_size=8).found("LS108")) == 1


def test_parts_of_a_data_set_by_hand_are_compared_below_their_subsets():
    def subset(order):
        keys = {"mapped": lambda rank: order(rank)[rank::2], "subset": str, "dataset_size": 32}
        return trained(lambda rank: [list(range(first, first + 4)) for first in range(0, 32, 4)], **keys)

    assert (
        len(subset(lambda rank: sorted(range(64), key=lambda index: index * (7 + 4 * rank) % 61)).found("LS108")) == 1
    )
    assert subset(lambda rank: list(range(64))).found("LS108") == []


def test_a_sampler_that_deals_to_more_ranks_than_there_are_is_named():
    (finding,) = trained(distributed=dealt(world=4)).found("LS108")
    assert finding.evidence == "the sampler deals to 4 ranks, but there are 2"


def test_workers_that_all_give_the_same_samples_are_named():
    def streamed(digest):
        keys = {"is_iterable": True, "num_workers": 2}
        return trained(lambda rank: [[n] for n in range(4)], digest=lambda rank, batch: digest(batch[0]), **keys)

    (finding,) = streamed(lambda n: str(n // 2)).found("LS109")
    assert (finding.where.line, finding.ranks) == (10, (0, 1))
    assert streamed(str).found("LS109") == streamed(lambda n: "constant").found("LS109") == []


def probed(values):
    samples = {str(index): [[index, index + 1], [index % 2]] for index in range(8)}

    def told(rank):
        return {index: [[values(rank, value) for value in part] for part in parts] for index, parts in samples.items()}

    return trained(distributed=dealt()).add("probe", at=at(10), loader=0, dataset_size=64, samples=told)


def test_numbers_that_are_exchanged_one_for_one_are_named():
    (finding,) = probed(lambda rank, value: (value * 5 + 3) % 11 if rank else value).found("LS110")
    assert "one for one: 0 is 3, 1 is 8" in finding.evidence
    assert probed(lambda rank, value: value).found("LS110") == []
    assert probed(lambda rank, value: value // (1 + rank)).found("LS110") == []  # not one for one
    assert probed(lambda rank, value: 9 if rank and value == 3 else value).found("LS110") == []  # one word is masked


def noise(digest, steps=4, every=1):
    script = Script().optimizer()
    for number in range(steps):
        script.step()
        if number % every == 0:
            script.add("drawn", at=at(24), digest=lambda rank, number=number: digest(rank, number))
    return script


def test_noise_that_is_equal_on_all_ranks_is_a_warning():
    (finding,) = noise(lambda rank, number: str(number)).found("LS111")
    assert finding.where.line == 24
    right = [
        noise(lambda rank, number: f"{rank} {number}"),
        noise(lambda rank, number: "the same in each step"),
        noise(lambda rank, number: str(number), steps=12, every=4),  # pictures to look at, now and then
        noise(lambda rank, number: str(number), steps=2),
    ]
    assert [script.found("LS111") for script in right] == [[], [], [], []]
    assert noise(lambda rank, number: str(number)).epoch(whole()).found("LS101") != []


@pytest.mark.parametrize(
    ("lines", "takes"),
    [
        ("z = torch.randn(8)\nz = z.narrow(0, rank * 4, 4)", True),
        ("z = torch.randn(8)\nfirst = rank * 4\nx = z[first : first + 4]", True),
        ("x = data[torch.randint(0, 9, (8,))].chunk(2)[dist.get_rank()]", True),
        ("z = local(torch.randn(8), rank)\ndef local(x, number):\n    return x[number::2]", True),
        ("z = torch.randn(8)\nclass A:\n    def take(self):\n        return z[self.rank]", True),
        (
            "def draw():\n    while True:\n        yield {'z': torch.randn(8)}\nfor z in islice(draw(), rank, None): 1",
            True,
        ),
        ("self.z = torch.randn(8)\nz, y = self.z[rank::2], 3", True),
        ("for x in data:\n    x = x[rank::2]\n    x = x + torch.randn_like(x)", False),
        ("x = mine(data)\nx += torch.randn(8)\ndef mine(x):\n    return x[rank::2]", False),
        ("x = data[rank::2] + torch.randn(8)\nx = gather(model(x))[rank]", False),
    ],
)
def test_rows_of_what_all_ranks_draw_are_no_noise(lines, takes, tmp_path):
    (script := tmp_path / "train.py").write_text(lines)
    row = next(number for number, line in enumerate(lines.splitlines(), 1) if "torch.rand" in line)
    assert flows.takes_rows_of_rank(str(script), row) is takes


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ("rank = 0\ntorch.manual_seed(seed)\nenv = Env(seed=seed)", 2),
        ("def seed_all(seed):\n    random.seed(seed)\nseed_all(args.seed)", 3),
        ("def seed_all(seed):\n    random.seed(seed)\nseed_all(args.seed + rank)", None),
        ("random.seed(4)\ntorch.manual_seed(4 + dist.get_rank())", None),
        ("data = draw(default_rng(1))\ng = torch.Generator().manual_seed(2)", None),  # it may make the data set
    ],
)
def test_the_line_that_seeds_all_ranks_alike_is_found(lines, row, tmp_path):
    (script := tmp_path / "train.py").write_text(lines)
    assert sources.seeds_alike(str(script)) == row


def test_shares_by_hand_that_stay_the_same_in_all_epochs_are_compared():
    def epochs(order):
        script = Script().optimizer()
        for epoch in range(2):
            turn = lambda rank, epoch=epoch: order(rank)[:: 1 - 2 * epoch]  # noqa: E731
            script.epoch(
                lambda rank, turn=turn: [turn(rank)[first : first + 4] for first in range(0, 32, 4)], epoch=epoch
            )
        return script.found("LS108")

    assert len(epochs(lambda rank: [index for batch in drawn(rank) for index in batch])) == 1
    assert epochs(lambda rank: list(range(64))[rank::2]) == []
    assert trained(drawn).found("LS108") == []  # one epoch: drawn at random, perhaps


def test_ranks_that_take_parts_of_the_same_batches_train_on_other_data():
    def split(elements, digest):
        batch = lambda rank: [[4 * n + k for k in range(4)] for n in range(8)]  # noqa: E731
        script = trained(batch)
        for event in script.events:
            event |= {"elements": 40} if event["kind"] == "batch" else {}
        given = Script()
        for step in range(3):
            given.add(
                "inputs", at=at(23), model=0, elements=elements, digest=lambda rank, step=step: digest(rank, step)
            )
        for event in given.events:
            if event["kind"] == "inputs":
                script.events.append(event | {"number": 1000 + event["number"]})
        return script.found("LS101")

    assert split(20, lambda rank, step: f"{rank} {step}") == []
    assert len(split(40, lambda rank, step: f"{rank} {step}")) == 1  # noise on the same samples
    assert len(split(20, lambda rank, step: str(step))) == 1


def test_batches_that_a_script_draws_itself_and_that_are_equal_are_named():
    def given(digest, steps=4):
        script = Script().optimizer()
        for step in range(steps):
            script.add("inputs", at=at(23), model=0, digest=lambda rank, step=step: digest(rank, step)).step()
        return script.found("LS101")

    assert given(lambda rank, step: str(step))[0].where.line == 23
    assert given(lambda rank, step: f"{rank} {step}") == given(lambda rank, step: "full batch") == []
    assert given(lambda rank, step: str(step), steps=2) == []


def test_an_order_of_the_script_that_is_shuffled_away_is_a_warning():
    lost = {"reordered": {"kind": "ShortFirst", "at": at(8)}, "distributed": dealt(kind="DistributedSamplerWrapper")}
    (finding,) = trained(**lost).found("LS113")
    assert (finding.where.line, "ShortFirst, and a DistributedSamplerWrapper" in finding.evidence) == (8, True)
    assert trained(distributed=dealt()).found("LS113") == []
    assert trained(**lost, train=False).found("LS113") == []
