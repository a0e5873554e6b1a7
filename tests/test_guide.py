"""The guide: its commands print what its pages quote, and no number stands in a page that no command has printed."""

import re

import pytest

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
    if page.stem != "README":
        picture = page.with_suffix(".svg")
        assert f"]({picture.name})" in text
        assert "prefers-color-scheme: dark" in picture.read_text()


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
