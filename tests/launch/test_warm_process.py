"""The process from which ranks are forked, and the processes that are forked from it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch import preload, warm_process
from lockstep.trainer import local_ranks
from tests.processes import HANG_S, is_running, launched, wait_for
from tests.selection import mainly

pytestmark = pytest.mark.skipif(not warm_process.is_possible(), reason="this system starts ranks cold")
ROOT = Path(__file__).parents[2]


def program(case, folder, cwd=ROOT, **variables):
    command = [sys.executable, "-m", "tests.launch.warm_cases", case, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("case", mainly(["warm"], ["warm", "cold"]))
def test_processes_are_like_new_interpreters(tmp_path, case):
    out, err = program(case, tmp_path).communicate(timeout=HANG_S)
    first, second = json.loads(out.rpartition(" ")[0])
    assert err == ""
    for rank, fields in enumerate((first, second)):
        assert fields["leads_session"]
        assert all(fields["default_signals"])
        assert fields["blocked"] == []
        assert not fields["ignores_hangup"]
        assert fields["name"] == "MainProcess"
        assert fields["start_method"] == multiprocessing.get_start_method()  # for loader workers
        assert (fields["rank"], fields["gone"]) == (str(rank), False)
        assert fields["imported"] == (case == "warm")
        assert fields["parent_threads"] == 1 or case == "cold"
    assert all(a != b for a, b in zip(first["draws"], second["draws"], strict=True))


@pytest.mark.exhaustive  # the test below starts ranks cold for another reason
def test_module_that_starts_a_thread_makes_ranks_start_cold(tmp_path):
    out, err = program("unsafe", tmp_path).communicate(timeout=HANG_S)
    assert "note: importing the modules started 1 thread, so ranks start cold" in err
    assert [fields["rank"] for fields in json.loads(out.rpartition(" ")[0])] == ["0", "1"]


def test_killed_warm_process_makes_ranks_start_cold(tmp_path):
    out, err = program("killed", tmp_path).communicate(timeout=HANG_S)
    assert err == (
        "note: the process from which ranks are forked was killed by signal 9, so ranks start cold: "
        "each of them imports torch\n"
    )
    assert [fields["imported"] for fields in json.loads(out.rpartition(" ")[0])] == [False, False]


def test_warm_process_that_cannot_start_makes_ranks_start_cold(monkeypatch, capfd):
    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(warm_process, "_warm_pid", None)
    monkeypatch.setattr(warm_process.forkserver, "ensure_running", fail)
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)
    before = dict(os.environ)
    warm_process.start()
    assert capfd.readouterr().err == (
        "note: the process to fork ranks from did not start ([Errno 24] Too many open files), so ranks start cold: "
        "each of them imports torch\n"
    )
    assert warm_process._warm_pid is None
    assert dict(os.environ) == before


@pytest.mark.exhaustive
def test_warm_process_starts_under_a_long_tmpdir(tmp_path):
    folder = tmp_path / ("long" * 30)  # no socket can have such a path
    folder.mkdir()
    out, err = program("warm", tmp_path, TMPDIR=str(folder)).communicate(timeout=HANG_S)
    assert err == ""
    assert [fields["imported"] for fields in json.loads(out.rpartition(" ")[0])] == [True, True]


def test_files_in_the_current_directory_replace_no_module_of_the_warm_process(tmp_path):
    for name in ("wave", "queue", "random"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
    code = "import sys; sys.path.remove(''); from tests.launch import warm_cases; warm_cases.main('warm', '.')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "imported").exists()


@pytest.mark.exhaustive
def test_pool_of_threads_that_is_left_open_does_not_keep_a_rank_alive(tmp_path):
    out, err = program("threads", tmp_path).communicate(timeout=HANG_S)
    assert err == ""
    assert len(json.loads(out.rpartition(" ")[0])) == 2


def test_ranks_ignore_a_hangup_where_their_launcher_does(tmp_path):
    out, _ = program("nohup", tmp_path).communicate(timeout=HANG_S)
    assert [fields["ignores_hangup"] for fields in json.loads(out.rpartition(" ")[0])] == [True, True]


def test_warm_process_ends_when_its_launcher_is_killed(tmp_path):
    launcher = program("wait", tmp_path)
    wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
    warm = int((tmp_path / "0").read_text())
    children = Path(f"/proc/{warm}/task/{warm}/children").read_text().split()
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not is_running(warm))
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    launcher.communicate()


TASKS = """
import json
import os
import sys
from tests.own_tasks import Plain

class Names(Plain):
    def loss(self, model, batch):
        if model.training and os.environ["RANK"] == "0":
            with open(os.environ["NAMES"], "w") as file:
                json.dump(list(sys.modules), file)
        return super().loss(model, batch)
"""


def _preloaded(folder):
    """Names of all modules that are loaded where those of the warm process are."""
    own = ("lockstep.cli.application", *local_ranks.MODULES)
    modules = ",".join((*warm_process.MODULES, *own, "torch.utils.tensorboard"))
    command = f"import importlib, sys, json; [importlib.import_module(m) for m in {modules!r}.split(',')]; "
    command += "print(json.dumps(list(sys.modules)))"
    return json.loads(subprocess.run([sys.executable, "-c", command], capture_output=True, check=True).stdout)


@pytest.mark.exhaustive
@launched(
    ("train", "{folder}/tasks.py:Names", "train.steps=3", "--nproc", 2, "--run-dir", "{folder}/run"),
    _preloaded,
    NAMES="{folder}/names",
)
def test_imports_of_a_rank_until_its_first_step_are_preloaded(launch):
    done, loaded = launch.done
    assert done.returncode == 0, done.stderr
    late = set(json.loads((launch.folder / "names").read_text())) - set(loaded)
    heavy = ("torch", "numpy", "pydantic", "rich", "tensorboard")
    heavy = [name for name in late if name.split(".")[0] in heavy and "._" not in name]  # private parts are small
    assert sorted(heavy) == []


def test_open_device_of_an_accelerator_is_a_reason_not_to_fork(monkeypatch):
    threads = len(os.listdir("/proc/self/task"))
    assert preload.why_not_safe(threads) is None
    assert preload.why_not_safe(threads - 1) == "importing the modules started 1 thread"
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidiactl")
    assert preload.why_not_safe(threads) == "importing the modules opened /dev/nvidiactl"
