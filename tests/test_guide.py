"""The guide: its commands print what its pages quote, and no number stands in a page that no command has printed."""

import dataclasses
import inspect
import re
import runpy

import pytest
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

from tests.guide_commands import NUMBER, ROOT, differences, output_of, quoted

PAGES = sorted((ROOT / "docs" / "guide").glob("*.md"))
# A command of each page, which the tests of the scripts and of `lockstep verify` run, too.
QUOTES = [
    pytest.param(page, *pair, id=f"{page.stem}: {pair[0]}", marks=pytest.mark.exhaustive if number else ())
    for page in PAGES
    for number, pair in enumerate(quoted(page.read_text()))
]


@pytest.mark.parametrize(("page", "command", "quote"), QUOTES)
def test_commands_print_what_the_page_quotes(page, command, quote):
    assert quote.strip(), "no output is quoted"
    assert differences(quote, output_of(command)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_of_the_text_are_printed_by_commands(page):
    text = page.read_text()
    quotes = " ".join(re.sub(r"(?<=\d),(?=\d{3})", "", quote) for _, quote in quoted(text))
    printed = {float(number) for number in NUMBER.findall(quotes.replace("-", " "))}
    prose = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+|(Amdahl|Young|Daly) \d{4}", "", prose)
    claimed = set(re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}", prose))
    assert {number for number in claimed if float(number.replace(",", "")) not in printed} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short_and_say_what_to_read_next(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 130
    assert "Read next: [" in text
    if page.stem not in ("README", "questions"):
        picture = page.with_suffix(".svg")
        assert f"]({picture.name})" in text
        assert "prefers-color-scheme: dark" in picture.read_text()


SIDE = r"[\d(](?:[\d.+*/() -]*[\d)])?"
SUM = re.compile(rf"(?<![\w.]){SIDE}(?: = {SIDE})+")
"""Sums worked by hand, such as 57.6 / 128 = 0.45, also several in a row."""


def wrong_sums(text):
    """The sums in a text whose sides differ by more than the digits that are written."""
    for found in SUM.findall(" ".join(text.split())):
        *sides, last = found.split(" = ")
        digits = len(last.partition(".")[2])
        if any(abs(eval(side) - eval(last)) > 0.501 * 10**-digits for side in sides):
            yield found


def test_sums_worked_by_hand_are_right():
    assert {page.stem: list(wrong_sums(page.read_text())) for page in PAGES if any(wrong_sums(page.read_text()))} == {}
    counts = {page.stem: len(SUM.findall(" ".join(page.read_text().split()))) for page in PAGES}
    assert counts["evaluation"] >= 8
    assert counts["ddp"] >= 5
    assert list(wrong_sums("57.6 / 128 = 0.45, `(1 + 2) / 2 =\n1.6` and 1 + 1 = 2 = 3")) == [
        "(1 + 2) / 2 = 1.6",
        "1 + 1 = 2 = 3",
    ]


NUMBERED = [page for page in PAGES if page.stem not in ("README", "questions")]


@pytest.mark.parametrize("page", NUMBERED, ids=lambda page: page.stem)
def test_pages_end_with_a_question(page):
    ending = page.read_text().split("\n## Question\n\n")[1]
    asked, answer = re.match(r"\*\*(.*?\?)\*\* (.*?)\n\nRead next: ", ending, re.DOTALL).groups()
    assert "##" not in ending
    assert asked
    assert len(answer) > 100


def test_all_questions_are_on_one_page_in_the_order_of_the_guide():
    collected = runpy.run_path(str(ROOT / "docs" / "guide" / "questions.py"))
    assert sorted(collected["pages"]()) == NUMBERED
    titles = [page.read_text().partition("\n")[0] for page in collected["pages"]()]
    assert [title.split(".")[0] for title in titles] == [f"# {number}" for number in range(1, len(titles) + 1)]
    question_page = (ROOT / "docs" / "guide" / "questions.md").read_text()
    assert question_page == collected["text"](), "run: python docs/guide/questions.py"


def test_names_of_fsdp_today_are_names_of_torch():
    fsdp, saving = torch.distributed.fsdp, torch.distributed.checkpoint.state_dict
    table = (
        (ROOT / "docs" / "guide" / "over_time.md").read_text().partition("| FSDP1 | FSDP2 |")[2].partition("\n\n")[0]
    )
    today = " ".join(row.split(" | ")[1] for row in table.strip().splitlines()[1:])
    names = {name for code in re.findall(r"`([^`]+)`", today) for name in re.findall(r"[A-Za-z_]\w{4,}", code)}
    known = {*dir(fsdp), *dir(fsdp.FSDPModule), *dir(saving), *dir(torch.distributed.tensor), *dir(torch.nn.utils)}
    known |= {*dir(torch.distributed.tensor.DTensor), *inspect.signature(fsdp.fully_shard).parameters}
    known |= {field.name for field in dataclasses.fields(saving.StateDictOptions)}
    assert names - known - {"torch", "utils", "model", "parameter", "parameters", "block", "False"} == set()
    assert len(names) > 15


def test_differences_are_found():
    assert differences("a 1.00\nb 2", "a 1.05\nb 2") == []
    assert differences("a 3e-8", "a 5e-9") == []
    assert differences("...\nb 2\n...", "a 1\nb 2\nc 3") == []
    assert differences("a 1 ...", "a 1 b 2") == []
    assert differences("a 1 ...", "a 2 b 2")
    assert differences("a 1", "a 2")
    assert differences("a 1", "b 1")
    assert differences("a 1", "a 1\nb 2")
    assert differences("a 1\nb 2", "a 1")
