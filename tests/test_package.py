"""The distributions as pip installs them: what is in them, and that they work where nothing of the repository is."""

import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import lockstep
from tests.processes import HANG_S, ROOT

SOURCE = ROOT / "src" / "lockstep"
AUDIT = ROOT / "packages" / "audit"


class Distribution(NamedTuple):
    """A distribution of the repository."""

    name: str
    folder: Path
    module: str
    license: str = "Apache-2.0"
    licenses: frozenset[str] = frozenset({"LICENSE"})

    @property
    def source(self):
        return self.folder / "src" / self.module

    @property
    def settings(self):
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def wheel(self):
        return f"torch_{self.name}-{lockstep.__version__}-py3-none-any.whl"

    def files(self):
        """All files below `src`, as paths there."""
        found = [path for path in self.source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        return {path.relative_to(self.source.parent).as_posix() for path in found}


ENGINE = Distribution("lockstep", ROOT, "lockstep")
_DATA = {f"src/lockstep_recipes/recipes/LICENSE-{name}.txt" for name in ("digits", "docstrings")}
OTHERS = [
    Distribution(
        "lockstep_recipes",
        ROOT / "packages" / "recipes",
        "lockstep_recipes",
        "Apache-2.0 AND CC-BY-4.0 AND PSF-2.0",
        frozenset({"LICENSE", *_DATA}),
    ),
    Distribution(
        "lockstep_lab",
        ROOT / "packages" / "lab",
        "lockstep_lab",
        "Apache-2.0 AND MIT",
        frozenset({"LICENSE", "src/lockstep_lab/report/vendor/LICENSE"}),
    ),
    Distribution("lockstep_audit", AUDIT, "lockstep_audit"),
]
DISTRIBUTIONS = [ENGINE, *OTHERS]
PROJECT = ENGINE.settings["project"]


def run(*command, code=0, **more):
    """The output of a program that ends with `code`, in an environment that knows nothing of this checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean,
        timeout=HANG_S,
        **more,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The folder that has the sdists, and the wheels that were made of the sdists only."""
    folder = tmp_path_factory.mktemp("package")
    run(sys.executable, "-m", "venv", folder / "tools")
    python = folder / "tools" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "setuptools>=77")
    ignored = shutil.ignore_patterns(".*", "build", "runs", "dist-wheels", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "repository", ignore=ignored)
    out = folder / "made"
    build = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    for one in DISTRIBUTIONS:
        run(python, "-c", build, "sdist", out, cwd=folder / "repository" / one.folder.relative_to(ROOT))
    for sdist in out.glob("*.tar.gz"):
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        run(python, "-c", build, "wheel", out, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    return out


@pytest.mark.exhaustive
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(made):
    for one in DISTRIBUTIONS:
        with zipfile.ZipFile(made / one.wheel) as archive:
            names = set(archive.namelist())
            about = f"torch_{one.name}-{lockstep.__version__}.dist-info"
            own = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
            licenses = {f"{about}/licenses/{name}" for name in one.licenses}
            assert names == one.files() | own | licenses, one.name
            metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
        assert metadata["License-Expression"] == one.license, one.name
        assert set(metadata.get_all("License-File")) == one.licenses, one.name
        assert metadata.get_payload().startswith("# "), one.name
        if one is ENGINE:
            extras = {"recipes", "lab", "audit", "images", "text", "ct", "lm", "all"}
            assert set(metadata.get_all("Provides-Extra")) >= extras


@pytest.mark.exhaustive
def test_the_sdist_has_the_package_and_what_builds_it(made):
    for one in DISTRIBUTIONS:
        with tarfile.open(made / f"torch_{one.name}-{lockstep.__version__}.tar.gz") as archive:
            names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        names = {name for name in names if ".egg-info/" not in name}
        about = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
        about |= {"CHANGELOG.md", "CITATION.cff"} if one is ENGINE else set()
        assert names == {f"src/{name}" for name in one.files()} | about, one.name


@pytest.mark.exhaustive
def test_the_wheel_trains_in_an_environment_that_has_nothing_else(made, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_ = tmp_path / "venv" / "bin"
    install = ["pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    run(bin_ / "python", "-m", *install, made / ENGINE.wheel)
    call = lambda *arguments, **more: run(bin_ / "lockstep", *arguments, cwd=tmp_path, **more)  # noqa: E731
    call("init", "mine.py")
    call("train", "mine.py:MyTask", "train.steps=3")  # the engine needs no other package
    assert "pip install -e packages/recipes" in call("train", "digits", code=2)
    assert "pip install -e packages/lab" in call("report", "runs/digits", code=2)
    run(bin_ / "python", "-m", *install, *(made / one.wheel for one in OTHERS))
    assert "Check this training: lockstep verify digits" in call("train", "digits", "train.steps=3", "--nproc", "2")
    call("report", "runs/digits")
    assert "uPlot" in (tmp_path / "runs" / "digits" / "report.html").read_text()
    assert "local" in call("doctor", "presets")
    assert "docstrings" in call("recipes")
    assert "Lightning" in call("init", "--from", "lightning")
    call("config", "mine.py:MyTask")
    # The empty package `lockstep` of PyPI has one file, which replaces ours where it is installed later.
    (path,) = bin_.parent.glob("lib/python*/site-packages/lockstep/__init__.py")
    path.write_text("")
    said = run(bin_ / "lockstep", "recipes", cwd=tmp_path, code=2)
    assert "pip uninstall lockstep torch-lockstep" in said


def test_every_data_file_of_the_packages_is_declared():
    """Quicker than building wheels: the patterns of pyproject.toml match every file that is not a module."""
    for one in DISTRIBUTIONS:
        patterns = one.settings["tool"]["setuptools"]["package-data"][one.module]
        declared = {path for pattern in patterns for path in one.source.glob(pattern)}
        files = {one.source.parent / name for name in one.files() if not name.endswith(".py")}
        assert files == declared, one.name
        folders = {path.parent for path in one.source.rglob("*.py")}
        assert all((folder / "__init__.py").is_file() for folder in folders), one.name


def test_all_distributions_have_the_same_version_and_pin_each_other():
    extras = PROJECT["optional-dependencies"]
    for one in OTHERS:
        project, tool = one.settings["project"], one.settings["tool"]["setuptools"]
        assert importlib.import_module(one.module).__version__ == lockstep.__version__
        assert tool["dynamic"]["version"] == {"attr": f"{one.module}.__version__"}
        name = one.name.removeprefix("lockstep_")
        assert extras[name] == [f"torch-lockstep-{name}=={lockstep.__version__}"]
        for key in ("requires-python", "authors"):
            assert project[key] == PROJECT[key], one.name
        page = f"{PROJECT['urls']['Documentation']}docs/audit.html"
        assert project["urls"].items() <= (PROJECT["urls"] | {"Documentation": page}).items() or (
            project["urls"].items() <= PROJECT["urls"].items()
        )
        assert (one.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        if one.folder != AUDIT:
            assert project["dependencies"] == [f"torch-lockstep=={lockstep.__version__}"]
    torch = [one for one in PROJECT["dependencies"] if re.match(r"torch\b[^m]", one)]
    assert OTHERS[-1].settings["project"]["dependencies"] == torch  # the audit: nothing else
    assert "audit" in extras["all"][0].partition("[")[2].strip("]").split(",")


def test_extras_name_only_extras_that_there_are():
    extras = PROJECT["optional-dependencies"]
    named = {
        one for found in re.findall(r"torch-lockstep\[([\w,-]+)\]", str(extras.values())) for one in found.split(",")
    }
    assert {"images", "text", "ct"} <= set(extras) >= named


def test_addresses_of_the_project_stand_in_one_file():
    """OWNER stands for the owner of the repository, until there is one. Then these are the owner's addresses."""
    owner = re.escape(re.fullmatch(r"https://github\.com/([\w-]+)/torch-lockstep", PROJECT["urls"]["Homepage"])[1])
    pattern = re.compile(rf"github\.(com|io)[:/]{owner}/torch-lockstep|{owner}\.github\.io")
    paths = [*ROOT.glob("*.*"), *ROOT.glob("docs/**/*.md"), *SOURCE.rglob("*.py"), *ROOT.glob(".github/**/*.*")]
    paths += [path for path in ROOT.glob("packages/**/*.*") if path.suffix in (".py", ".md", ".toml")]
    naming = {
        path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and pattern.search(path.read_text())
    }
    of_others = {f"packages/{name}/pyproject.toml" for name in ("recipes", "lab", "audit")}
    assert naming == {"pyproject.toml"} | of_others
    assert set(PROJECT["urls"]) >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def test_files_about_the_version_name_this_version():
    assert f"\nversion: {lockstep.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## [Unreleased]\n" in changes or f"\n## [{lockstep.__version__}]" in changes
    bug = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    assert any("lockstep doctor env" in field["attributes"]["label"] for field in bug["body"])


def test_the_workflow_of_releases_gives_every_link_of_the_readme_a_whole_address():
    """Commands of the workflow's step: PyPI shows README.md, and knows no files beside it."""
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (script,) = [step["run"] for step in steps if "links in README.md" in step.get("name", "")]
    text = (ROOT / "README.md").read_text()
    for pattern, address in re.findall(r"s#(.+?)#(.+?)#g", script):
        address = address.replace("$repository", "https://host/o/r").replace("$GITHUB_REF_NAME", "v1")
        text = re.sub(pattern, address, text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links), links


def test_threads_sleep_while_they_wait_unless_somebody_says_otherwise(monkeypatch):
    """The variables must be set before torch is imported: `import lockstep` is made as in a new process."""
    import runpy

    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for given, torch_first, expected in (
        ({}, False, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}),
        ({"KMP_BLOCKTIME": "200"}, False, {"KMP_BLOCKTIME": "200"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({}, True, {}),
    ):
        with monkeypatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            if not torch_first:
                patch.delitem(sys.modules, "torch")
            runpy.run_path(lockstep.__file__)
            assert {name: os.environ[name] for name in names if name in os.environ} == expected
            for name in names:
                os.environ.pop(name, None)
