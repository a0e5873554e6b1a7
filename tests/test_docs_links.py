"""Links of the documentation lead to files and headings that exist."""

import re
from pathlib import Path

import pytest
import typer

from lockstep.cli.application import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
    *sorted(ROOT.glob("packages/*/*.md")),
    *sorted(ROOT.glob("src/lockstep/migration/*.md")),
]


def prose(path):
    """The text of a page without blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The names of a page's headings, as GitHub and the site make them."""
    names = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {
        f"{name}-{names[:place].count(name)}" if name in names[:place] else name for place, name in enumerate(names)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`]*`", "", prose(page))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_site_has_every_page_of_the_documentation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {str(page.relative_to(ROOT)) for page in pages} <= set(listed)
    assert all((ROOT / page).exists() for page in listed)
    parts = re.search(r"for part in (.+?);", (ROOT / "Makefile").read_text())[1].split()
    linked = {path.relative_to(ROOT).parts[0] for pattern in parts for path in ROOT.glob(pattern)}
    outside = set()
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s:]+)[)#]", re.sub(r"`[^`]*`", "", prose(page)))
        outside |= {(page.parent / link).resolve().relative_to(ROOT).parts[0] for link in links} - linked
    assert not outside, "MkDocs finds no such file"


def test_the_page_on_commands_has_every_command():
    listed = re.findall(r"^\| `lockstep ([\w-]+)", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    assert set(typer.main.get_command(app).commands) == set(listed)


@pytest.mark.parametrize("page", [page for page in PAGES if "`tests/" in page.read_text()], ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page):
    files = set(re.findall(r"`(tests/[\w/]+\.py)", page.read_text()))
    assert not [path for path in files if not (ROOT / path).is_file()]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text())
    assert not [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()]


def test_every_option_of_every_command_says_what_it_does():
    silent = []

    def look(command, words):
        for name, one in getattr(command, "commands", {}).items():
            look(one, f"{words} {name}")
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        silent.extend(f"{words} {one.opts[-1]}" for one in options if not one.help)
        if not hasattr(command, "commands"):
            assert (command.epilog or "").startswith("Example: lockstep "), words

    look(typer.main.get_command(app), "lockstep")
    assert not silent


def test_tests_that_pages_name_are_there():
    pattern = r"`((?:packages/\w+/)?tests/[\w/]+\.py(?:::\w+)?)`"
    named = {one for page in PAGES for one in re.findall(pattern, page.read_text())}
    missing = []
    for path, _, name in (one.partition("::") for one in sorted(named)):
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text() + "def (":
            missing.append(f"{path}::{name}")
    assert len(named) > 20
    assert not missing


def test_targets_and_paths_of_the_makefile_are_there():
    """Also the targets that pages and workflows name, and the paths of workflows."""
    makefile = (ROOT / "Makefile").read_text()
    workflows = "".join(path.read_text() for path in [*ROOT.glob(".github/workflows/*.yml"), ROOT / ".ci" / "run"])
    named = set(re.findall(r"(?<![\w/])(?:packages|tests|benchmarks|examples)/[\w./-]*\w", makefile + workflows))
    assert "tests/launch/cluster" in named
    assert not [path for path in named if not (ROOT / path).exists()]
    asked = re.findall(r"`make ([a-z-]+)", "".join(page.read_text() for page in PAGES))
    asked += re.findall(r"^(?:.*run: .*)?make ([a-z-]+)", workflows, re.MULTILINE)
    assert {"test", "check", "test-gpu"} <= set(asked)
    assert set(asked) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
