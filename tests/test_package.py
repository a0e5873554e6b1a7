"""The distribution as pip installs it: what is in it, and that it works where nothing of the repository is."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml

import lockstep
import lockstep_audit
from tests.processes import HANG_S, ROOT

SOURCE = ROOT / "src" / "lockstep"
AUDIT = ROOT / "packages" / "audit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_PART = {"__pycache__", "torch_lockstep.egg-info"}
LICENCES = {"LICENSE", "src/lockstep/recipes/LICENSE-digits.txt", "src/lockstep/recipes/LICENSE-docstrings.txt"}
LICENCES |= {"src/lockstep/report/vendor/LICENSE"}


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
    """The folder that has the sdist, and the wheel that was made of the sdist alone."""
    folder = tmp_path_factory.mktemp("package")
    run(sys.executable, "-m", "venv", folder / "tools")
    python = folder / "tools" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "setuptools>=77")
    ignored = shutil.ignore_patterns(".*", "build", "runs", "dist-wheels", *NO_PART)
    shutil.copytree(ROOT, folder / "repository", ignore=ignored)
    out = folder / "made"
    build = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    run(python, "-c", build, "sdist", out, cwd=folder / "repository")
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(python, "-c", build, "wheel", out, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    return out


def files_of_package():
    """All files below `src`, as paths there."""
    found = [path for path in SOURCE.rglob("*") if path.is_file() and not NO_PART & set(path.parts)]
    return {path.relative_to(SOURCE.parent).as_posix() for path in found}


@pytest.mark.exhaustive
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(made):
    (wheel,) = made.glob("*.whl")
    assert wheel.name == f"torch_lockstep-{lockstep.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"torch_lockstep-{lockstep.__version__}.dist-info"
        own = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
        licences = {f"{about}/licenses/{name}" for name in LICENCES}
        assert names == files_of_package() | own | licences
        metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-4.0 AND MIT AND PSF-2.0"
    assert set(metadata.get_all("License-File")) == LICENCES
    assert set(metadata.get_all("Provides-Extra")) >= {"images", "text", "ct", "lm", "all"}
    assert metadata.get_payload().startswith("# Lockstep")


@pytest.mark.exhaustive
def test_the_sdist_has_the_package_and_what_builds_it(made):
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if ".egg-info/" not in name}
    about = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in"}
    about |= {"PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names == {f"src/{name}" for name in files_of_package()} | about


@pytest.mark.exhaustive
def test_the_wheel_trains_in_an_environment_that_has_nothing_else(made, tmp_path):
    (wheel,) = made.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_ = tmp_path / "venv" / "bin"
    install = ["pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel]
    run(bin_ / "python", "-m", *install)
    call = lambda *arguments: run(bin_ / "lockstep", *arguments, cwd=tmp_path)  # noqa: E731
    assert "Check this training: lockstep verify digits" in call("train", "digits", "train.steps=3", "--nproc", "2")
    call("report", "runs/digits")
    assert "uPlot" in (tmp_path / "runs" / "digits" / "report.html").read_text()
    assert "local" in call("doctor", "presets")
    assert "docstrings" in call("recipes")
    assert "Lightning" in call("init", "--from", "lightning")
    call("init", "mine.py")
    call("config", "mine.py:MyTask")
    # The empty package `lockstep` of PyPI has one file, which replaces ours where it is installed later.
    (path,) = bin_.parent.glob("lib/python*/site-packages/lockstep/__init__.py")
    path.write_text("")
    said = run(bin_ / "lockstep", "recipes", cwd=tmp_path, code=2)
    assert "pip uninstall lockstep torch-lockstep" in said


def test_every_data_file_of_the_package_is_declared():
    """Quicker than building a wheel: the patterns of pyproject.toml match every file that is no module."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lockstep"]
    declared = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    files = {SOURCE.parent / name for name in files_of_package() if not name.endswith(".py")}
    assert files == declared
    packages = {path.parent for path in SOURCE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in packages)


def test_the_audit_has_the_same_version_and_needs_torch_alone():
    audit = tomllib.loads((AUDIT / "pyproject.toml").read_text())
    assert lockstep_audit.__version__ == lockstep.__version__
    assert audit["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lockstep_audit.__version__"}
    extras = PROJECT["optional-dependencies"]
    assert extras["audit"] == [f"torch-lockstep-audit=={lockstep.__version__}"]
    assert "audit" in extras["all"][0].partition("[")[2].strip("]").split(",")
    torch = [one for one in PROJECT["dependencies"] if re.match(r"torch\b[^m]", one)]
    assert audit["project"]["dependencies"] == torch
    for key in ("requires-python", "authors"):
        assert audit["project"][key] == PROJECT[key]
    page = f"{PROJECT['urls']['Documentation']}docs/audit.html"
    assert audit["project"]["urls"].items() <= (PROJECT["urls"] | {"Documentation": page}).items()
    assert (AUDIT / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    source = AUDIT / "src" / "lockstep_audit"
    patterns = audit["tool"]["setuptools"]["package-data"]["lockstep_audit"]
    declared = {path for pattern in patterns for path in source.glob(pattern)}
    inside = [path for path in source.rglob("*") if path.is_file() and not NO_PART & set(path.parts)]
    assert {path for path in inside if path.suffix != ".py"} == declared
    assert all((path.parent / "__init__.py").is_file() for path in inside)


def test_extras_have_what_the_remedies_in_the_source_name():
    extras = PROJECT["optional-dependencies"]

    def named(text):
        return {one for found in re.findall(r"torch-lockstep\[([\w,-]+)\]", text) for one in found.split(",")}

    of_source = named("".join(path.read_text() for path in SOURCE.rglob("*.py")))
    assert of_source >= {"images", "text", "ct"}
    assert of_source | named(str(extras.values())) <= set(extras)


def test_addresses_of_the_project_stand_in_one_file():
    """OWNER stands for the owner of the repository, until there is one. Then these are the owner's addresses."""
    owner = re.escape(re.fullmatch(r"https://github\.com/([\w-]+)/torch-lockstep", PROJECT["urls"]["Homepage"])[1])
    pattern = re.compile(rf"github\.(com|io)[:/]{owner}/torch-lockstep|{owner}\.github\.io")
    paths = [*ROOT.glob("*.*"), *ROOT.glob("docs/**/*.md"), *SOURCE.rglob("*.py"), *ROOT.glob(".github/**/*.*")]
    paths += [path for path in AUDIT.rglob("*.*") if path.suffix in (".py", ".md", ".toml")]
    naming = {
        path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and pattern.search(path.read_text())
    }
    assert naming == {"pyproject.toml", "packages/audit/pyproject.toml"}
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
    (script,) = [step["run"] for step in steps if "README.md" in step.get("run", "")]
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
