"""The pages of rules: each has its rule's words, and its wrong and right lines do what the page says."""

import re
import runpy

import pytest

from lockstep_audit import events
from lockstep_audit.events import EventHistory
from lockstep_audit.report.outcome import outcome
from lockstep_audit.rules.catalogue import ALL, BY_ID
from packages.audit.tests import forked, page_ranks
from packages.audit.tests.processes import ROOT

PRELUDE = re.search(r"```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.DOTALL)[1]
END = "dist.destroy_process_group()\n"
PAGES = {rule.id: (ROOT / f"docs/audit/{rule.name}.md").read_text() for rule in ALL}
LINES = {id: re.findall(r"```python\n(.*?)```", page, re.DOTALL) for id, page in PAGES.items()}
SHOWN = [id for id, blocks in LINES.items() if blocks]
QUICK = ("LS401",)


@pytest.mark.parametrize("rule", ALL, ids=[rule.id for rule in ALL])
def test_a_page_has_the_words_of_its_rule(rule):
    page = PAGES[rule.id]
    assert page.startswith(f"# {rule.id} {rule.name}: {rule.title}\n\n{rule.severity.capitalize()}. ")
    assert "## How it is seen" in page
    assert len(LINES[rule.id]) in (0, 2)


def test_most_pages_have_lines_and_there_is_no_page_without_a_rule():
    assert len(SHOWN) >= 12
    assert {path.stem for path in (ROOT / "docs/audit").glob("*.md")} == {rule.name for rule in ALL}


def test_the_index_is_that_of_the_rules():
    page = (ROOT / "docs/audit.md").read_text()
    assert runpy.run_path(str(ROOT / "docs/audit_index.py"))["page"]() == page
    counted = re.search(r"(\d+) rules checked, (\d+) not exercised", page).groups()
    assert sum(map(int, counted)) == len(ALL)


def ran(folder, ids):
    """What is found in the wrong and the right lines of each page, by id: outcomes, and the line that is marked."""
    jobs, lines = [], {}
    for id in ids:
        for name, block in zip(("wrong", "right"), LINES[id], strict=True):
            script = folder / f"{id}_{name}" / "script.py"
            script.parent.mkdir()
            text = PRELUDE + block + END
            script.write_text(text)
            jobs.append((str(script), str(script.parent / "events"), 4))
            lines[id, name] = next((n for n, line in enumerate(text.splitlines(), 1) if f"# {id}" in line), None)
    (done,) = forked.ended([forked.start(page_ranks.main, jobs)])
    found = {}
    for id, name in lines:
        read = events.read(folder / f"{id}_{name}" / "events")
        assert read, done.stdout[-3000:] + done.stderr[-3000:]
        found[id, name] = outcome(EventHistory(read)), lines[id, name]
    return found


def check(found):
    wrong = []
    for (id, name), (result, line) in found.items():
        ids = {finding.rule: finding.where.line if finding.where else None for finding in result.findings}
        errors = {finding.rule for finding in result.of("error")}
        if name == "right" and (errors or id in ids):
            wrong.append(f"{id} right: {ids}")
        if name == "wrong" and (id not in ids or (line and ids[id] != line) or errors - {id}):
            wrong.append(f"{id} wrong: {ids}, marked {line}")
        wrong += [f"{id} {name}: {note}" for note in result.notes]
    assert wrong == []


def test_some_wrong_lines_are_named_and_right_lines_are_not(tmp_path):
    check(ran(tmp_path, QUICK))


@pytest.mark.exhaustive
def test_all_wrong_lines_are_named_and_right_lines_are_not(tmp_path):
    check(ran(tmp_path, [id for id in SHOWN if id not in QUICK]))


def test_wrong_lines_that_are_marked_name_their_own_rule():
    assert {id for id in SHOWN for mark in re.findall(r"# (LS\d+)", LINES[id][0]) if mark != id} == set()
    assert BY_ID.keys() == PAGES.keys()
