"""How people start an audit, and how scripts end: launchers, notebooks, interrupts, `sys.exit`, `os._exit`, signals."""

import importlib
import os
import signal
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep_audit import __main__ as module
from lockstep_audit import events, pytest_plugin, run
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.events import EventHistory
from lockstep_audit.judge import FAILED, FINDINGS, USAGE, AuditVerdict, judge
from lockstep_audit.observe import communication, digests, torch_private, training
from lockstep_audit.observe.recorder import LAUNCHER, Counts, recorder
from lockstep_audit.settings import Settings
from packages.audit.tests import forked, page_ranks
from packages.audit.tests.processes import HANG_S, environment, wait_for
from packages.audit.tests.test_pages import END, LINES, PRELUDE

WRONG = PRELUDE + LINES["LS101"][0]
SPAWNED = """
import os
import torch.multiprocessing as mp


def main(rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": FREE}
    exec(SCRIPT)


if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Folders of the events of scripts that end in different ways. One process runs all of them."""
    folder, jobs = tmp_path_factory.mktemp("ends"), []
    ends = {
        "exit": "import sys\nsys.exit(3)\n",
        "leave": "import os\nos._exit(4)\n",
        "error": "raise KeyError('no such word')\n",
        "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    }
    for name, end in ends.items():
        script = folder / name / "train.py"
        script.parent.mkdir()
        script.write_text(WRONG + end)
        jobs.append((str(script), str(script.parent / "events"), 30))
    forked.ended([forked.start(page_ranks.main, jobs)])
    return {name: folder / name / "events" for name in ends}


def codes(folder):
    return [event.get("code") for event in EventHistory(events.read(folder)).of("exit")]


def test_whatever_ends_a_script_what_was_seen_is_judged(ended, capsys):
    assert codes(ended["exit"]) == [3, 3]
    assert codes(ended["leave"]) == [4, 4]
    assert codes(ended["error"]) == [1, 1]
    assert codes(ended["killed"]) == []  # the events until then are there
    for folder in ended.values():
        assert judge(folder, Settings(), failed=True) is AuditVerdict.FINDINGS
        assert "LS101" in capsys.readouterr().out


def test_a_script_that_fails_without_a_finding_says_so(tmp_path, capsys):
    writer = events.EventWriter(tmp_path, 0)
    writer.write("start", world_size=1)
    assert judge(tmp_path, Settings()) is AuditVerdict.INCONCLUSIVE
    writer.write("exit", code=3)
    assert judge(tmp_path, Settings()) is AuditVerdict.FAILED


def test_a_notebook_is_told_what_to_do(tmp_path, capsys, monkeypatch):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    with pytest.raises(AuditUsageError, match="nbconvert"):
        run.run([str(notebook)], Settings(), nproc=2)
    for arguments in ([str(notebook)], ["train.py"]):
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())  # the kernel of a notebook
        with pytest.raises(SystemExit) as ended:
            module.main(arguments)
        assert ended.value.code == USAGE
        assert "nbconvert" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "said"), [("--evry", "no such option"), ("train.py", "is not a file")])
def test_a_wrong_option_and_a_script_that_is_not_there_are_told_apart(target, said):
    with pytest.raises(AuditUsageError, match=said):
        run.run([target, "3"], Settings(), nproc=2)


@pytest.mark.parametrize("arguments", [["none.py"], [], ["--every", "0", __file__]])
def test_a_module_that_gets_no_script_is_an_error_of_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(arguments)
    assert ended.value.code == USAGE
    assert capsys.readouterr().err


def test_ctrl_c_ends_the_ranks_and_judges_what_was_seen(tmp_path, monkeypatch, capsys):
    script, done = tmp_path / "train.py", []
    script.write_text("")

    def interrupted(process, folder, nproc, patience):
        writer = events.EventWriter(folder, 0)
        writer.write("start", world_size=2)
        writer.write("step", optimizer=0, index=0)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.subprocess, "Popen", lambda *command, **options: SimpleNamespace())
    monkeypatch.setattr(run, "_wait", interrupted)
    monkeypatch.setattr(run, "_end", done.append)
    assert run.run([str(script)], Settings(), nproc=2) == FAILED
    assert len(done) == 1
    told = capsys.readouterr()
    assert "the report covers what was observed so far" in told.err
    assert "0 errors" in told.out


def test_the_fixture_fails_a_test_with_the_report(tmp_path, monkeypatch):
    def ran(command, **options):
        report = command[command.index("--output") + 1]
        with open(report, "w") as file:
            file.write(f"the report of {command[-2:]}")
        return SimpleNamespace(returncode=FINDINGS * ("wrong.py" in command), stdout="")

    monkeypatch.setattr(pytest_plugin.subprocess, "run", ran)
    audit = pytest_plugin.lockstep_audit.__wrapped__(tmp_path)
    assert audit("right.py", "--epochs") == "the report of ['right.py', '--epochs']"
    with pytest.raises(pytest.fail.Exception, match="exit code 3\nthe report of"):
        audit("wrong.py", "--epochs")


def told(command, folder, **extra):
    """(exit code, output) of a command."""
    run = {"text": True, "timeout": HANG_S, "cwd": folder, "env": environment(**extra)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **run)
    return done.returncode, done.stdout


def write(folder, text):
    (folder / "train.py").write_text(text)
    return "train.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [END, "import os\ndist.barrier()\nos._exit(0)\n"], ids=["", "os._exit"])
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep_audit"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "lockstep_audit"],
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_under_a_launcher_of_others_the_first_rank_reports(launcher, end, tmp_path):
    code, output = told([sys.executable, "-m", *launcher, write(tmp_path, WRONG + end)], tmp_path)
    assert (code != 0, "error[LS101]" in output) == (True, True), output


@pytest.mark.exhaustive
def test_processes_of_spawn_are_observed(tmp_path):
    from packages.audit.tests.page_ranks import free_port

    text = SPAWNED.replace("SCRIPT", repr(WRONG + END)).replace("FREE", repr(str(free_port())))
    code, output = told([sys.executable, "-m", "lockstep_audit", write(tmp_path, text)], tmp_path)
    assert (code, "error[LS101]" in output) == (FINDINGS, True), output


@pytest.mark.exhaustive
def test_an_interrupted_audit_leaves_no_rank_behind(tmp_path):
    script = write(tmp_path, WRONG + "print('PID', os.getpid(), flush=True)\nimport time\ntime.sleep(10_000)\n")
    (tmp_path / script).write_text("import os\n" + (tmp_path / script).read_text())
    with (tmp_path / "output").open("w") as output:
        command = [sys.executable, "-m", "lockstep_audit.command", "--nproc", "2", script]
        started = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    wait_for(lambda: len(pids(tmp_path)) == 2)
    ranks = pids(tmp_path)
    started.send_signal(signal.SIGINT)
    assert started.wait(HANG_S) == FINDINGS
    assert "error[LS101]" in (tmp_path / "output").read_text()
    wait_for(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))  # process 1 may reap them later


def pids(folder):
    lines = (folder / "output").read_text().splitlines()
    return [int(line[4:]) for line in lines if line.startswith("PID")]


def test_sigterm_is_as_ctrl_c_and_only_while_the_ranks_run():
    def stop():
        with run._ended_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: False)  # the signal comes within

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        stop()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("port", "run_id", "is_client"),
    [(29500, "a", True), (58473, "a", False), (58473, "b", True)],
    ids=["the launcher's store", "a store of the script's own", "another launcher below"],
)
def test_a_script_that_spawns_makes_a_store_of_its_own(port, run_id, is_client, monkeypatch):
    """torch then lets its first process serve the store, as it does without a launcher."""
    monkeypatch.setenv(LAUNCHER, "a 29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has this name, too
    after = communication.store_made("localhost", port, 0, 2, None)
    assert rendezvous._torchelastic_use_agent_store() is is_client
    if after is not None:
        after(None, None)
    assert rendezvous._torchelastic_use_agent_store()


def test_an_observed_function_may_have_arguments_of_any_name():
    """LightningModule.log is called with `name=`."""

    def log(name, function, value=0):
        return name, function, value

    around = torch_private.around("log", log, lambda *_, **__: None)
    assert around(name="loss", function="mean", value=1) == ("loss", "mean", 1)


def test_the_arithmetic_of_an_optimizer_is_not_observed_but_that_of_its_closure_is(tmp_path, monkeypatch):
    """It has several calls for each parameter, which cost more than all else that is observed in a step."""
    monkeypatch.setattr(recorder, "folder", tmp_path)
    monkeypatch.setattr(recorder, "_waiting", deque())
    monkeypatch.setattr(recorder, "counts", Counts())
    seen = []
    call = torch_private.around("mul_", torch.Tensor.mul_, lambda *_, **__: seen.append("mul_"), frequent=True)
    monkeypatch.setattr(torch.Tensor, "mul_", call)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    begins = register_optimizer_step_pre_hook(training.step_begins)
    ends = register_optimizer_step_post_hook(training.step_ends)
    try:
        for _ in range(2):  # momentum multiplies from the second step on
            weight.grad = torch.ones(2)
            optimizer.step()
        assert (seen, weight.tolist()) == ([], pytest.approx([0.71, 0.71]))  # 1 - 0.1 - 0.1 * 1.9
        optimizer.step(lambda: weight.grad.mul_(2.0).sum())
        assert seen == ["mul_"]
        weight.grad.mul_(2.0)
        assert seen == ["mul_"] * 2
    finally:
        begins.remove()
        ends.remove()


def test_what_an_observer_computes_is_not_observed(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "folder", tmp_path)
    seen = []

    def observer(tensor, *_, **__):
        seen.append(tensor.tolist())
        tensor.clone().mul_(3.0)
        recorder.guard("another", tensor.clone().mul_, 3.0)
        return lambda result, error: result.clone().mul_(3.0)

    monkeypatch.setattr(torch.Tensor, "mul_", torch_private.around("mul_", torch.Tensor.mul_, observer))
    assert [torch.ones(1).mul_(2.0).item() for _ in range(2)] == [2.0, 2.0]
    assert seen == [[1.0], [1.0]]


def test_constant_tensors_are_told_from_others():
    whole = [torch.zeros(3), torch.full((2, 2), 0.5), torch.empty(0), torch.tensor(1)]
    assert all(map(digests.is_constant, whole))
    assert not digests.is_constant(torch.tensor([[0.0, 0.0], [0.0, 1e-9]]))
