"""The commands and the keys of docs/scripts.md, with small data and small models."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from packages.lab.tests.verify import recipe_cases
from tests.processes import ROOT
from tests.selection import mainly

PAGE = (ROOT / "docs" / "scripts.md").read_text()
RECIPES = {"variables": "ag_news", "text": "ag_news", "pictures": "segmentation", "imagenet": "imagenet", "ct": "nlst"}
"""The recipe of each part of the page."""
OTHER_RECIPES = {
    **dict.fromkeys(["task.mosaic=0.5", 'checkpoint.keep_best="max eval/mAP"'], "detection"),
    **dict.fromkeys(["task.batch_norm=sync", "task.batch_norm=group"], "imagenet"),
    'checkpoint.keep_best="max eval/accuracy"': "image_folder",
}
SMALLER = {
    "task.image_size=512": "task.image_size=64",
    "task.image_size=448": "task.image_size=24",
    "task.max_length=128": "task.max_length=18",
    "batch.global=512": "batch.global=64",
    "batch.micro={0: 256, 12: 128}": "batch.micro={0: 8, 1: 4}",
    "train.steps=1000": "train.steps=3",
    "data.workers=8": "data.workers=2",
    'train.unfreeze=[{epoch: 5, match: ["backbone.*"]}]': 'train.unfreeze=[{epoch: 1, match: ["encoder.*"]}]',
    "train.unfreeze={0: head, 1: last 2, 2: last 4, 3: all}": "train.unfreeze={0: head, 1: last 1, 2: all}",
}
"""What is too large for the small data and models."""
TOGETHER = {
    "batch.accumulate": ["batch.per_rank=2"],
    "batch.global": ["batch.per_rank=null", "batch.accumulate=null"],
    "batch.micro": ["batch.per_rank=null", "batch.accumulate=null", "batch.global=64"],
    "train.steps": ["train.epochs=null"],
    "task.eval_size": ["task.eval_resize=292"],
    "task.eval_resize": ["task.eval_size=256"],
    "task.image_size": ["train.epochs=13"],
    "data.fold": ["data.eval=null"],
}
"""What a key needs and the recipe has, but not the small data and models."""
KEY = re.compile(r"((?:[a-z_]+\.)+[a-z_0-9]+|precision|seed)=(.+)", re.DOTALL)
USERS = re.compile(r"task\.model=|ag_news:|=DIR$|\.csv$|last\.pt$")
"""Data and models of a user, which the small data and models replace."""
QUICK = ["device=cpu", "log.writers=[json_lines]", "log.pictures=0", "log.model_summary=false"]
BASE = ["train.min_steps=null", "train.epochs=2", "train.eval_every_epochs=1", *QUICK]


def codes():
    """(part of the page, code) of the right columns."""
    for part in PAGE.split('<a name="')[1:]:
        for row in re.findall(r"^\| (.*) \|$", part, re.MULTILINE)[1:]:
            yield from ((part.partition('"')[0], code) for code in re.findall(r"`([^`]+)`", row.split(" | ")[1]))


CODES = list(dict.fromkeys(codes()))
KEYS = [(part, code) for part, code in CODES if KEY.fullmatch(code)]
COMMANDS = sorted({code for _, code in CODES if code.startswith("lockstep ")})
COMMANDS += re.findall(r"^    (lockstep [^$\n]*)$", PAGE, re.MULTILINE)


def groups():
    """(recipe, keys): keys that one training takes together, because they set different things."""
    found = []
    for part, code in KEYS:
        if USERS.search(code):
            continue
        recipe, name = OTHER_RECIPES.get(code, RECIPES[part]), KEY.fullmatch(code)[1]
        kind = re.sub(r"^(batch|schedule\.warmup|task\.(?:image|eval)_|train\.(?=epochs|steps)).*", r"\1", name)
        for of, keys in found:
            if of == recipe and kind not in keys:
                keys[kind] = code
                break
        else:
            found.append((recipe, {kind: code}))
    return [(recipe, tuple(keys.values())) for recipe, keys in found]


GROUPS = groups()
OFTEN = [group for group in GROUPS if group[0] == "detection"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of torch.compile
@pytest.mark.parametrize(("recipe", "keys"), mainly(OFTEN, GROUPS))
def test_a_training_takes_the_keys(tmp_path, recipe, keys):
    given = []
    for code in keys:
        name, value = KEY.fullmatch(SMALLER.get(code, code)).groups()
        value = value.strip('"')
        given += [*TOGETHER.get(name, []), f"{name}={value}"]
    config = config_file.load(recipe, [*recipe_cases.overrides(recipe, tmp_path), *BASE, *given])
    assert Trainer(config, run_dir=tmp_path / "run", quiet=True).fit()["train/loss"] > 0


def test_data_and_models_of_users_are_values_of_their_keys():
    tried = [(part, code) for part, code in KEYS if USERS.search(code)]
    assert len(tried) > 10
    for part, code in tried:
        config_file.load(RECIPES[part], [code])


def test_sizes_by_epoch_are_those_of_the_page():
    (sizes,) = (code for _, code in KEYS if code.startswith("task.image_size={"))
    for between, changes in (("step", [6, 12]), ("linear", [3, 9])):
        given = [] if between == "step" else ["task.image_size_between=linear"]
        task = config_file.load("imagenet", [sizes, *given]).task
        options = ClassificationOptions.model_validate({name: task[name] for name in task if name.startswith("image_")})
        by_epoch = [options.size_at(epoch, 0) for epoch in range(16)]
        assert [epoch for epoch in range(1, 16) if by_epoch[epoch] != by_epoch[epoch - 1]] == changes
        assert sorted(set(by_epoch)) == [128, 160, 192]
    assert "to 160 at epoch 3, and to 192 at epoch 9" in PAGE


def call(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, (arguments, done.output)
    return done.output


def run(command):
    """Run a command of the page on one rank, with small data and models in the current folder. Returns its output."""
    words = shlex.split(command)[1:]
    if "--nproc" in words:
        del words[words.index("--nproc") : words.index("--nproc") + 2]
    words = ["local" if word == "g5" else word for word in words]  # a preset that this machine can run
    if words[0] != "train" and words[:2] != ["tune", "lr"]:
        return call(*words)
    place = 1 if words[0] == "train" else 2
    target = words[place]
    recipe = yaml.safe_load(Path(target).read_text())["name"] if target.endswith(".yaml") else target
    folder = Path("data", str(len(list(Path().glob("data/*")))))
    folder.mkdir(parents=True)
    mine = [word for word in words[place + 1 :] if not USERS.search(word)]
    small = [*recipe_cases.overrides(recipe, folder), *BASE]
    return call(
        *words[: place + 1],
        *small,
        *mine,
        *(["--steps", "10"] if words[0] == "tune" else ["train.epochs=null", "train.steps=2"]),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(*words):
    """The commands of the page that begin with these words."""
    return [command for command in COMMANDS if command.split()[1 : 1 + len(words)] == list(words)]


def test_every_command_is_run_by_a_test():
    names = ["train", "evaluate", "export", "predict", "doctor", "tune"]
    assert sorted(command for name in names for command in of(name)) == sorted(COMMANDS)
    assert all(of(name) for name in names)


@pytest.mark.exhaustive
def test_a_text_model_is_trained_evaluated_and_exported(folder):
    (folder / "my.yaml").write_text(config_file.to_yaml(config_file.load("ag_news")))
    for command in [*of("train", "ag_news"), *of("train", "my.yaml")]:
        run(f"{command} --fresh" if "--run-dir" not in command else command)
    for command in [*of("evaluate"), *of("export")]:
        assert run(command)
    assert list((folder / "OUT").glob("*.safetensors"))


@pytest.mark.exhaustive
def test_images_are_trained_and_predicted(folder):
    from PIL import Image

    for name in ("segmentation", "detection", "image_folder"):
        (command,) = of("train", name)
        run(command)
    Image.new("RGB", (40, 30)).save("a.jpg")
    (predict,) = of("predict")
    run(predict)
    assert (folder / "found.json").is_file()


@pytest.mark.exhaustive
def test_other_recipes_are_trained(folder):
    for command in [*of("train", "imagenet"), *of("tune", "lr"), *of("train", "nlst"), *of("doctor")]:
        assert run(command)


def test_the_shell_passes_variables_on(folder, monkeypatch):
    (line,) = re.findall(r"^    (lockstep train .*\$\{EPOCHS.*)$", PAGE, re.MULTILINE)

    def keys(**variables):
        shell = subprocess.run(
            ["sh", "-c", line.replace("lockstep", "echo")], capture_output=True, text=True, env=variables
        )
        return config_file.load("ag_news", shell.stdout.split()[2:])

    assert keys().train.epochs == 3
    config = keys(EPOCHS="5", BASE_LR="1e-4", BATCH="64")
    assert (config.train.epochs, config.optim.lr, config.batch.global_) == (5, 1e-4, 64)
