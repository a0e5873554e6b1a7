"""Make docs/demo.svg, the picture in the README, from what `make demo` prints: `.venv/bin/python docs/picture.py`."""

import io
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent


def main() -> None:
    console = Console(record=True, width=118, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            "lockstep train digits --nproc 2 --run-dir runs/demo",
            "lockstep evaluate runs/demo --nproc 2",
            "lockstep predict runs/demo --samples 5",
        ):
            console.print(Text(f"$ {command}", style="bold green"))
            arguments = [str(HERE.parent / ".venv" / "bin" / "lockstep"), *command.split()[1:]]
            output = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder).stdout
            for line in output.splitlines():
                style = "cyan" if "eval/" in line else ""
                console.print(Text(line, style=style, overflow="ellipsis", no_wrap=True))
            console.print()
    console.save_svg(str(HERE / "demo.svg"), title="make demo")


main()
