"""The site: its navigation has the kinds and the order of docs/README.md, and it publishes pages only."""

import re
import runpy
from types import SimpleNamespace

import yaml

import lockstep
from tests.processes import ROOT

KINDS = ("Tutorials", "How-to", "Reference", "Explanation")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, without the Python objects in it."""


Loader.add_multi_constructor("", lambda *_: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def placed(entries, kind=()):
    """Each page of the navigation, with the titles above it."""
    for entry in entries:
        title, content = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(content, list):
            yield from placed(content, (*kind, title))
        else:
            yield kind, content


def navigation():
    """Pages by kind, or by kind and group of How-to, in their order."""
    found = {}
    for (kind, *groups), page in placed([entry for entry in SITE["nav"] if set(entry) & set(KINDS)]):
        found.setdefault((kind, *groups[: kind == "How-to"]), []).append(page)
    return found


def overview():
    """The same from docs/README.md: the pages of the first links of the rows, then of the others."""
    found, kind = {}, ()
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if heading := re.match(r"(##+) (.+)", line):
            kind = (*kind[: len(heading[1]) - 2], heading[2])
        elif kind and kind[0] in KINDS and line.startswith("| ["):
            links = [ROOT / "docs" / link for link in re.findall(r"\]\(([^)#:]+\.md)", line)]
            pages = [str(link.resolve().relative_to(ROOT)) for link in links]
            found.setdefault(kind, []).append(pages)
    return found


def test_the_navigation_has_the_kinds_and_the_order_of_the_overview():
    listed, shown = overview(), navigation()
    assert list(listed) == list(shown)
    for kind, rows in listed.items():
        firsts = [row[0] for row in rows]
        assert firsts == [page for page in shown[kind] if page in firsts], kind
        named = {page for row in rows for page in row}
        below = {page for page in shown[kind] if page.startswith(("docs/guide/", "docs/audit/"))}
        assert set(shown[kind]) - below <= named, kind


def test_the_site_shows_the_version_and_publishes_no_code():
    hooks = runpy.run_path(str(ROOT / "docs" / "site.py"))
    config = {"site_name": SITE["site_name"]}
    assert hooks["on_config"](config)["site_name"] == f"Lockstep {lockstep.__version__}"
    assert {"*.py", "*.ipynb", "*.toml", "*.yaml"} <= set(SITE["exclude_docs"].split())
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docs/loop.md"))
    text = hooks["on_page_markdown"]("[a file](../examples/loop/gan.py), [a page](step.md)", page=page)
    assert "](../examples" not in text
    assert "](step.md)" in text
