"""Write the tables of folders in docs/architecture.md from the rules of tests/test_house.py: python docs/folders.py"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- from tests/test_house.py by docs/folders.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """The folders of the engine and of the packages on top of it, with what they contain and what they may import."""
    from tests.test_house import ALLOWED

    engine = [name for name in ALLOWED if not name.startswith("lockstep_")]
    return "\n".join(
        f"| {title} | what it contains | may import |\n|---|---|---|\n"
        + "".join(f"| {place(name)} | {contents(name)} | {permitted(ALLOWED[name])} |\n" for name in names)
        for title, names in (
            ("folder of `src/lockstep`", engine),
            ("folder of `packages`", [name for name in ALLOWED if name not in engine]),
        )
    )


def source(name: str) -> Path:
    """The file that describes a folder or a module."""
    from tests.test_house import SOURCES

    package, _, inner = (name if name.startswith("lockstep_") else f"lockstep.{name}").partition(".")
    path = SOURCES[package] / inner.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def place(name: str) -> str:
    return f"`{name.replace('.', '/')}{'/' if source(name).name == '__init__.py' else '.py'}`"


def contents(name: str) -> str:
    """The first paragraph of its docstring, on one line."""
    text = (ast.get_docstring(ast.parse(source(name).read_text())) or "").partition("\n\n")[0]
    return " ".join(text.replace("|", "\\|").split()).removesuffix(".")


def permitted(names: set[str]) -> str:
    return ", ".join(map(place, sorted(names))) or "nothing else"


def page() -> str:
    """The page with new tables."""
    text = PAGE.read_text()
    return re.sub(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: f"\n{tables()}\n", text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
