"""Write the run of this version, with a checkpoint of two ranks, that later versions must be able to read.

    python -m tests.checkpoints.make

It writes `tests/checkpoints/VERSION.tar.gz`. Run it once for each release, and change no file that is there already.
"""

import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import lockstep

HERE = Path(__file__).parent
CONFIG = ("toy", "train.steps=4", "train.ema_decay=0.9", "optim.clip_norm=1.0", "log.writers=[]")


def write(folder: Path, out: Path) -> None:
    """Write the files of a run that another version needs. What a run records of its machine is left out."""
    kept = [folder / "config.yaml", *sorted(path for path in (folder / "checkpoints").rglob("*") if path.is_file())]
    about = {"lockstep": lockstep.__version__, "world": 2}
    (folder / "environment.json").write_text(json.dumps(about))
    with gzip.GzipFile(out, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in [folder / "environment.json", *kept]:
            about_file = tarfile.TarInfo(path.relative_to(folder).as_posix())
            about_file.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(about_file, file)


def main() -> None:
    out = HERE / f"{lockstep.__version__}.tar.gz"
    if out.exists():
        sys.exit(f"{out} exists: a released version has written it")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "lockstep", "train", *CONFIG, "--nproc", "2", "--run-dir", str(run)]
        subprocess.run(command, check=True)
        write(run, out)


if __name__ == "__main__":
    main()
