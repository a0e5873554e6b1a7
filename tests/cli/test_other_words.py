"""`--epochs 3` and `lr=0.1`: words of other libraries are errors that name the key or option that is meant."""

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep.core.config import other_words
from lockstep.core.config.sections import all_keys
from lockstep.core.errors import UsageError

NEEDED = {
    "launch slurm": ["--nodes", "1", "--gpus-per-node", "1", "--time", "1:00"],
    "launch kubernetes": ["--nodes", "1", "--gpus-per-node", "1", "--image", "x", "--volume", "y"],
    "launch ssh": ["--hosts", "a"],
    "replay": ["--step", "1"],
}
"""Required options of commands."""


def walked(command, words=()):
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(words), command
    for name, one in (inner or {}).items():
        yield from walked(one, (*words, name))


COMMANDS = {name: one for name, one in walked(typer.main.get_command(app)) if name not in ("run", "audit")}
"""All commands that take no script's options."""


def call(command, *words):
    return CliRunner().invoke(app, [*command.split(), *NEEDED.get(command, []), *words], prog_name="lockstep")


def options_of(name):
    return {option for parameter in COMMANDS[name].params for option in parameter.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_words_of_others_mean(name):
    has, paths = options_of(name), {path for path, _ in all_keys()}
    given = {f"--{word}" for word in other_words.table()}
    given -= {word for word in given if word in has or word.replace("_", "-") in has}
    done = call(name, "toy", *(f"{word}=7" for word in sorted(given)))
    assert done.exit_code == 2, done.output
    where, _, rest = done.stderr.removeprefix("error: ").partition(f": lockstep {name} has no such options\n  remedy: ")
    unknown = given - set(where.split(", "))
    assert unknown <= {"--gres", "--output_file"}, "these mean options of few commands"
    written, *advice = rest.strip().removeprefix("write ").split("; ")
    assert any("leave it out, the same command resumes the run" in one for one in [written, *advice])
    for word in written.split() if rest.startswith("write ") else ():
        key = word.partition("=")[0]
        is_key = key in paths or key.startswith(("task.", "optim.args.", "train.stop_when.", "slurm.", "kubernetes."))
        assert (is_key and "overrides" in has) or word in has or word == "7", word


def test_keys_of_others_are_errors_that_name_ours():
    sections = {path.partition(".")[0] for path, _ in all_keys()}
    given = [word for word in other_words.table() if word not in sections and word not in ("gres", "output_file")]
    with pytest.raises(UsageError) as caught:
        config_file.load("toy", [f"{word}=7" for word in given])
    for word in given:
        assert f"command line: {word}: unknown key; " in str(caught.value)
    assert "known here" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--epochs", "3", "--lr=0.1"], "train.epochs=3 optim.lr=0.1"),
        (["--batch-size", "64", "--output_dir", "x"], "batch.global=64 --run-dir x"),
        (["--num_train_epochs", "3"], "train.epochs=3"),
        (["--per_device_train_batch_size", "8"], "batch.per_rank=8"),
        (["--max_epochs", "3", "--accumulate_grad_batches", "4"], "train.epochs=3 batch.accumulate=4"),
        (["--nproc_per_node", "2"], "--nproc 2"),
        (["--gpus", "2"], "--nproc 2"),
        (["--run_dir", "x"], "--run-dir x"),
        (["--optim.lr", "0.1"], "optim.lr=0.1"),
        (["--weight_decay", "0.1"], "optim.weight_decay=0.1"),
        (["--trainer.max_epochs", "3"], "train.epochs=3"),
        (["--bf16"], "precision=bf16"),
        (["--epochs"], "train.epochs=VALUE"),
    ],
)
def test_options_of_others_are_written_as_ours(words, written):
    done = call("train", "toy", *words)
    assert done.exit_code == 2
    assert done.stderr.endswith(f"remedy: write {written}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=1e-3"], "lr: unknown key; write optim.lr=0.001"),
        (["batch_size=64"], "batch_size: unknown key; write batch.global=64"),
        (["epochs=3"], "epochs: unknown key; write train.epochs=3"),
        (["optim.learning_rate=3"], "optim.learning_rate: unknown key; write optim.lr=3"),
        (["trainer.max_epochs=3"], "trainer: unknown key; write train.epochs=3"),
        (["optim.lr"], "'optim.lr' is not key=value; write optim.lr=VALUE"),
        (["optim.lr", "0.1"], "'optim.lr' is not key=value; write optim.lr=0.1"),
        (["lr", "seed=1"], "'lr' is not key=value; write optim.lr=VALUE"),
        (["resume=true"], "resume: unknown key; leave it out, the same command resumes the run"),
    ],
)
def test_keys_of_others_are_written_as_ours(words, message):
    with pytest.raises(UsageError) as caught:
        config_file.load("toy", words)
    assert str(caught.value) == f"the configuration has errors:\n  command line: {message}"


def test_what_is_written_is_accepted():
    given = ["optim.lr=0.1", "batch.global=20", "train.stop_when.metric=eval/loss", "train.stop_when.mode=min"]
    found = config_file.load("toy", [*given, other_words.meant("patience", "3").split()[-1], "optim.args.eps=1e-9"])
    assert found.train.stop_when.patience == 3


def test_commands_with_other_arguments_say_where_words_belong():
    assert "write batch.micro=8; give `lockstep train` this: optim.lr=0.1" in (
        call("evaluate", "runs/x", "--batch-size", "8", "--lr", "0.1").stderr
    )
    assert "write --nproc 2; give it after `--`, if it belongs to the script: -- --epochs 3" in (
        call("verify", "mine.py", "--epochs", "3", "--devices", "2").stderr
    )
    assert (
        "give it after the script: lockstep run train.py --epochs 3" in call("run", "--epochs", "3", "mine.py").stderr
    )
    assert "remedy: write --nproc 2\n" in call("run", "--nproc_per_node", "2", "mine.py").stderr
    assert "options come after the command: lockstep train ..." in call("--nproc", "2", "train", "toy").stderr
    assert "No such option: --frobnicate" in call("train", "toy", "--frobnicate", "3").stderr


def test_the_audit_says_where_words_belong(capsys):
    command = pytest.importorskip("lockstep_audit.command")
    assert command.main(["--epochs", "3", "mine.py"]) == 2
    assert "give it after the script: lockstep-audit train.py --epochs 3" in capsys.readouterr().err
    assert command.main(["--num_processes=4", "mine.py"]) == 2
    assert "write --nproc 4" in capsys.readouterr().err
