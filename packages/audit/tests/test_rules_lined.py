"""Rules on gathered rows in the order of ranks, and on counts that are summed over ranks again."""

import pytest

from packages.audit.tests.made_events import FILE, Script, at, dealt, in_batches


def dealt_in_turns(rank):
    return in_batches(list(range(rank, 32, 2)), 4)


def gathered(indices=dealt_in_turns, also=None, step=False, compared=None, lines=None, end=None, file=FILE, **keys):
    """An evaluation in turns, a gather of a row for each sample, and a comparison or a file behind it."""
    shared = {"train": False, "dataset_size": 32, "distributed": dealt()}
    script = Script().optimizer().step().epoch(indices, **shared, end=end)
    told = {"op": "all_gather", "group": "0", "sequence": 0, "shape": [16], "elements": 16}
    script.add("collective", at=[file, 41, "main"], **(told | keys))
    if also is not None:
        script.add("collective", at=at(42), **(told | also))
    script = script.step() if step else script
    if compared:
        script.add("lined_up", at=[file, 45, "main"], gathered_at=[file, 41, "main"], rows=compared)
    if lines:
        script.add("save", 0, at=[file, 46, "main"], path="/runs/rows.csv", how="open", mode="w")
        script.add("text", 0, path="/runs/rows.csv", lines=lines)
    return script


def test_rows_of_rank_after_rank_beside_the_data_are_a_warning():
    wrong = [
        gathered(compared=32),
        gathered(compared=32, shape=[16, 3], elements=48),
        gathered(compared=32, also={"shape": [], "elements": 1}),  # the number of rows
        gathered(lines=33),
        gathered(lines=32, op="all_gather_object", rows=16, elements=None),
        gathered(lines=32, op="all_gather_into_tensor", given=[16], shape=[32]),
    ]
    for script in wrong:
        (finding,) = script.found("LS610")
        assert (finding.where.line, finding.ranks) == (41, (0, 1))
        assert "samples 0, 2, 4, ... to rank 0 and 1, 3, 5, ..." in finding.evidence
    right = [
        gathered(),  # a sum of them, perhaps
        gathered(compared=32, also={}),  # labels, too
        gathered(compared=32, also={"op": "all_gather_object", "rows": -1}),
        gathered(compared=16),
        gathered(compared=32, step=True),
        gathered(compared=32, end={"backwards": 4}),
        gathered(lambda rank: in_batches(list(range(16 * rank, 16 * rank + 16)), 4), compared=32),
        gathered(lambda rank: in_batches(list(range(rank, 32, 2)), 16), compared=32),  # gathered batch by batch
        gathered(lines=40),
        gathered(lines=32, shape=[16, 3], elements=48),  # ids may be among the columns
        gathered(lines=32, op="all_gather_object", rows=-1, elements=None),  # records
    ]
    assert [script.found("LS610") for script in right] == [[]] * len(right)


@pytest.mark.parametrize(
    ("line", "beside", "written"),
    [
        ("rows = torch.cat(parts)", 1, 1),
        ("rows = torch.stack(parts, 1).flatten()", 1, 0),  # a comparison has looked at the values
        ("rows = [row for turn in zip(*parts) for row in turn]", 1, 0),
        ("rows = [parts[i % 2][i // 2] for i in range(32)]", 1, 0),
        ("labels = torch.cat([labels[each::2] for each in range(2)])", 0, 0),
        ("labels = labels[list(sampler)]", 0, 0),
        ("rows = in_turns(parts)", 1, 0),
    ],
)
def test_rows_that_the_text_may_bring_into_order_are_not_named(tmp_path, line, beside, written):
    script = tmp_path / "train.py"
    helper = "def in_turns(parts):\n    return sorted(parts)\n"
    script.write_text(helper + "\n" * 37 + f"def main():\n    gather(parts)\n    {line}\n" + "    write(rows)\n" * 6)
    assert len(gathered(compared=32, file=str(script)).found("LS610")) == beside
    assert len(gathered(lines=32, file=str(script)).found("LS610")) == written


def summed(ranks=(0, 1), added=True, file=FILE):
    script = Script().optimizer().step()
    for rank in ranks:
        script.add("summed_again", rank, at=[file, 33, "evaluate"], elements=3, added=added)
    return script


def test_a_count_that_is_summed_again_is_a_warning(tmp_path):
    (finding,) = summed().found("LS611")
    assert (finding.where.line, finding.ranks, "3 numbers" in finding.evidence) == (33, (0, 1), True)
    assert len(summed(added=lambda rank: rank == 1).found("LS611")) == 1
    assert summed(ranks=[1]).found("LS611") == summed(added=False).found("LS611") == []
    found = {}
    for line in ("counts.zero_()", "counts[:] = 0", "buffer[0] = hits", "weight.grad.zero_()", "counts[0] += hits"):
        script = tmp_path / f"{len(found)}.py"
        script.write_text("\n" * 31 + f"def evaluate():\n    dist.all_reduce(counts)\n    {line}\n")
        found[line] = len(summed(file=str(script)).found("LS611"))
    assert list(found.values()) == [0, 0, 0, 1, 1], found
