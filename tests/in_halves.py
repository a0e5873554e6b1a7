"""Run the tests in two processes at the same time, and print the results of one after the other.

    python tests/in_halves.py [options of pytest]

One process alone leaves a core idle while its tests wait for ranks.
"""

import os
import subprocess
import sys
import tempfile

SECOND = ("core", "__pycache__")
"""With the files of `tests` itself, this folder takes about half of the time; all other folders take the other half."""


def main() -> int:
    os.chdir(os.path.join(os.path.dirname(__file__), ".."))
    # Compiled modules are kept even where the environment says otherwise: each command that tests start would compile
    # the package anew, and each run of pytest all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    folders = [f"tests/{one.name}" for one in os.scandir("tests") if one.is_dir() and one.name not in SECOND]
    with tempfile.TemporaryFile("w+") as output:
        ignored = [f"--ignore={folder}" for folder in folders]
        second = subprocess.Popen([*pytest, *ignored], stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run([*pytest, *folders], check=False).returncode
            second.wait()
        finally:
            if second.poll() is None:
                second.terminate()
                second.wait()
            output.seek(0)
            print(output.read(), end="")
    return first or second.returncode


if __name__ == "__main__":
    sys.exit(main())
