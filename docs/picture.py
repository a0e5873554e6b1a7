"""Make the images of the README and docs from what commands print.

`.venv/bin/python docs/picture.py [demo] [verify]`
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
PICTURES = {
    "demo": [
        "lockstep train digits --nproc 2 --run-dir runs/demo",
        "lockstep evaluate runs/demo --nproc 2",
        "lockstep predict runs/demo --samples 5",
    ],
    "verify": ["lockstep verify digits --nproc 2"],
}


def draw(name: str, title: str, width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        for command in PICTURES[name]:
            console.print(Text(f"$ {command}", style="bold green"))
            arguments = [str(HERE.parent / ".venv" / "bin" / "lockstep"), *command.split()[1:]]
            output = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder).stdout
            for line in output.splitlines():
                style = "cyan" if "eval/" in line or " passed" in line else ""
                console.print(Text(line, style=style, overflow="ellipsis", no_wrap=True))
            console.print()
    console.save_svg(str(HERE / f"{name}.svg"), title=title)


for wanted in sys.argv[1:] or PICTURES:
    draw(wanted, "make demo" if wanted == "demo" else PICTURES[wanted][0], 118 if wanted == "demo" else 175)
