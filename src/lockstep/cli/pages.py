"""`lockstep --explain PAGE`: a page of the documentation, which the package has."""

from __future__ import annotations

from importlib import resources

from lockstep.core.errors import UsageError, did_you_mean


def names() -> list[str]:
    """The pages, by name."""
    files = resources.files("lockstep.pages").iterdir()
    return sorted(file.name.removesuffix(".md") for file in files if file.name.endswith(".md"))


def read(name: str) -> str:
    """The text of a page, as Markdown.

    Raises:
        UsageError: there is no such page.
    """
    known = names()
    if name not in known:
        remedy = f"{did_you_mean(name, known)}There are: {', '.join(known)}"
        raise UsageError(f"there is no page {name!r}", where="--explain", remedy=remedy)
    return resources.files("lockstep.pages").joinpath(f"{name}.md").read_text(encoding="utf-8")
