"""What MkDocs does to each page (`hooks` of mkdocs.yml): links to source files lead to the repository.

As long as the address of the repository is a placeholder in pyproject.toml, such links become plain text.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import lockstep

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Source"] if "OWNER" not in PROJECT["urls"]["Source"] else None
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_PAGES = (".md", ".png", ".svg", ".css", ".html")


def on_config(config: Any) -> Any:
    """Called once: the site names the version, and the repository if it has an address."""
    config["site_name"] = f"{config['site_name']} {lockstep.__version__}"
    config["repo_url"] = REPOSITORY
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if target.endswith(_PAGES):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return text if REPOSITORY is None else f"[{text}]({REPOSITORY}/blob/main/{path}{anchor})"

    lines, in_code = [], False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        lines.append(line if in_code else _LINK.sub(replaced, line))
    return "\n".join(lines)
