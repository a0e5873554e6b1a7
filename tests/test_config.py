import subprocess
import sys
from typing import get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from lockstep.configs import registry
from lockstep.configs.config_file import load, parse, read_run, recipes, to_yaml
from lockstep.core.config.sections import RunConfig, training_keys
from lockstep.core.errors import UsageError
from tests.processes import HANG_S

TOY = {"task": {"kind": "toy"}}


def refusal(values, overrides=(), where="file.yaml"):
    with pytest.raises(UsageError) as caught:
        parse(values, where, overrides)
    return str(caught.value)


def refused_load(target, overrides=()):
    with pytest.raises(UsageError) as caught:
        load(str(target), overrides)
    return str(caught.value)


def toy(*overrides, **sections):
    return parse(TOY | sections, "file.yaml", overrides)


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
        return str(path)

    return write


# ---- recipes and files


def test_every_recipe_loads_under_its_own_name():
    assert {"digits", "toy", "image_folder"} <= set(recipes())
    for name in recipes():
        assert load(name).name == name


def test_the_global_batch_of_every_recipe_is_fixed():
    """It must not depend on the number of ranks: another batch trains another model."""
    for name in recipes():
        assert load(name).batch.resolve(1).global_ == load(name).batch.resolve(8).global_, name


def test_every_recipe_says_what_it_is_for():
    assert all(len(about) > 20 and not about.startswith("#") for about in recipes().values())


def test_a_recipe_holds_what_its_file_says():
    found = load("digits")
    assert (found.task["kind"], found.task["channels"], found.data.train, found.batch.global_) == (
        "classification",
        1,
        "digits",
        64,
    )
    assert (found.optim.lr, found.optim.clip_norm, found.schedule.name, found.schedule.warmup_steps) == (
        0.003,
        1.0,
        "cosine",
        20,
    )


def test_a_file_needs_a_task_only_and_is_named_after_itself(write):
    found = load(write("task: {kind: toy}", "my_run.yaml"))
    assert found.name == "my_run"
    assert found.optim.name == "AdamW"
    assert found.precision == "fp32"
    assert load(write("name: other\ntask: {kind: toy}", "my_run.yml")).name == "other"


def test_a_task_section_has_the_defaults_of_its_kind():
    assert toy("task.hidden=7").task == {
        "kind": "toy",
        "samples": 1000,
        "eval_samples": 200,
        "hidden": 7,
        "layers": 1,
        "double": False,
    }


def test_a_users_class_is_a_task_and_keeps_its_own_keys(write):
    path = write("class Mine: pass", "own.py")
    found = load(f"{path}:Mine", ["task.depth=3", "task.name=x"])
    assert found.name == "own"
    assert found.task == {"kind": f"{path}:Mine", "depth": 3, "name": "x"}


def test_two_configs_share_nothing():
    one, other = toy(), toy()
    one.optim.args["momentum"] = 0.9
    one.log.every_steps = 7
    assert other.optim.args == {}
    assert toy().log.every_steps == 50


def test_reading_a_config_changes_no_argument():
    values = {"task": {"kind": "toy"}, "batch": {"global": 8}, "optim": {"args": {"eps": 1.0}}, "train": {"epochs": 3}}
    kept = yaml.safe_load(yaml.safe_dump(values))
    parse(values, "file.yaml", ["batch.per_rank=2", "optim.args.eps=2", "train.steps=4", "task.hidden=3"])
    assert values == kept


# ---- overrides


def test_overrides_reach_any_depth_of_a_recipe():
    found = load(
        "toy", ["seed=7", "optim.lr=0.5", "task.hidden=3", "optim.args.amsgrad=true", "data.drop_last=true", "name=x=y"]
    )
    assert (found.seed, found.optim.lr, found.task["hidden"], found.optim.args, found.data.drop_last, found.name) == (
        7,
        0.5,
        3,
        {"amsgrad": True},
        True,
        "x=y",
    )
    assert found.batch.global_ == 50  # what is not overridden stays


def test_an_override_of_one_key_keeps_the_others_of_its_section():
    found = toy("optim.lr=0.5", optim={"weight_decay": 0.25, "args": {"eps": 1e-3}})
    assert (found.optim.lr, found.optim.weight_decay, found.optim.args) == (0.5, 0.25, {"eps": 1e-3})


def test_the_last_override_of_a_key_holds():
    assert toy("seed=1", "seed=2").seed == 2


def test_an_override_may_be_a_section_or_a_list():
    found = toy("schedule={name: cosine, warmup_steps: 5}", "optim.groups=[{name: head, match: ['head.*'], lr: 1e-2}]")
    assert (found.schedule.name, found.schedule.warmup_steps) == ("cosine", 5)
    assert (found.optim.groups[0].match, found.optim.groups[0].lr) == (["head.*"], 0.01)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4", ".0001", "1e-04", "+1e-4"])
def test_numbers_may_be_written_in_any_usual_form(text, write):
    assert toy(f"optim.lr={text}").optim.lr == 1e-4
    assert load(write(f"task: {{kind: toy}}\noptim: {{lr: {text}}}")).optim.lr == 1e-4


@pytest.mark.parametrize("text", ["1e-8", "1e3", "1.5E+2"])
def test_numbers_may_be_written_in_any_usual_form_where_any_value_is_allowed(text, write):
    # YAML 1.1 reads 1e-8 as a string: torch would be given it
    own = write("class Mine: pass", "own.py")
    assert toy(f"optim.args.eps={text}").optim.args["eps"] == float(text)
    assert load(f"{own}:Mine", [f"task.scale={text}"]).task["scale"] == float(text)
    assert load(write(f"task: {{kind: toy}}\noptim: {{args: {{betas: [{text}, 0.9]}}}}")).optim.args["betas"] == [
        float(text),
        0.9,
    ]


def test_null_takes_a_value_away():
    found = load("digits", ["optim.clip_norm=null", "data.eval=null", "batch.global=null", "optim.weight_decay=~"])
    assert (found.optim.clip_norm, found.data.eval, found.batch.global_, found.optim.weight_decay) == (
        None,
        None,
        None,
        None,
    )


def test_null_is_refused_where_a_value_is_needed():
    assert "command line: optim.lr: None" in refusal(TOY, ["optim.lr=null"])


def test_per_rank_on_the_command_line_replaces_a_recipes_global_batch():
    found = load("toy", ["batch.per_rank=4", "batch.accumulate=2"])
    assert (found.batch.per_rank, found.batch.accumulate, found.batch.global_) == (4, 2, None)


def test_steps_on_the_command_line_replace_a_recipes_epochs():
    found = load("toy", ["train.steps=9", "train.eval_every_steps=3"])
    assert (found.train.steps, found.train.epochs, found.train.eval_every_steps, found.train.eval_every_epochs) == (
        9,
        None,
        3,
        None,
    )


@pytest.mark.parametrize("override", ["optim.lr", "seed", "=3", ""])
def test_an_override_without_key_or_value_is_refused(override):
    assert f"command line: {override!r} is not key=value" in refusal(TOY, [override])


@pytest.mark.parametrize("override", ["optim.lr=[1", "name=a: b: c", "seed='3"])
def test_an_override_that_is_not_yaml_is_refused_with_its_key(override):
    text = refusal(TOY, [override])
    assert f"command line: {override.partition('=')[0]}: " in text
    assert "not YAML" in text


@pytest.mark.parametrize("override", ["name=2020-13-45", "seed=0b_", "seed=!!int x"])
def test_an_override_that_yaml_cannot_make_a_value_of_is_refused(override):
    assert f"command line: {override.partition('=')[0]}: " in refusal(TOY, [override])


# ---- unknown keys, wrong values


@pytest.mark.parametrize(
    ("values", "wrong", "right"),
    [
        ({"presicion": "bf16"}, "presicion", "precision"),
        ({"optim": {"learning_rat": 1}, "sede": 3}, "sede", "seed"),
        ({"optim": {"weight_decy": 1}}, "optim.weight_decy", "optim.weight_decay"),
        ({"batch": {"globl": 1}}, "batch.globl", "batch.global"),
        ({"task": {"kind": "toy", "hiden": 3}}, "task.hiden", "task.hidden"),
        (
            {"optim": {"groups": [{"name": "a", "match": ["x"]}, {"name": "b", "match": ["y"], "weigth_decay": 1}]}},
            "optim.groups.1.weigth_decay",
            "optim.groups.1.weight_decay",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(values, wrong, right):
    text = refusal(TOY | values)
    assert f"file.yaml: {wrong}: unknown key; did you mean {right}?" in text


def test_an_unknown_key_is_refused_with_all_there_are():
    text = refusal(TOY | {"zzz": 1, "log": {"qqq": 2}})
    assert "zzz: unknown key; known here: name, seed, device, task," in text
    assert "log.qqq: unknown key; known here: every_steps, writers" in text


def test_keys_are_shown_as_they_are_written():
    assert "global_" not in refusal(TOY | {"batch": {"x": 1}})


@pytest.mark.parametrize(
    ("values", "path", "shown"),
    [
        ({"optim": {"lr": "fast"}}, "optim.lr", "'fast'"),
        ({"optim": {"lr": -1}}, "optim.lr", "-1"),
        ({"optim": {"lr": 0}}, "optim.lr", "0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr", "nan"),
        ({"optim": {"clip_norm": 0}}, "optim.clip_norm", "0"),
        ({"optim": 3}, "optim", "3"),
        ({"optim": None}, "optim", "None"),
        ({"optim": {"groups": {"a": 1}}}, "optim.groups", "{'a': 1}"),
        ({"optim": {"groups": [3]}}, "optim.groups.0", "3"),
        ({"optim": {"groups": [{"name": "a", "match": []}]}}, "optim.groups.0.match", "[]"),
        ({"optim": {"groups": [{"name": "a", "match": "*"}]}}, "optim.groups.0.match", "'*'"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"name": 2024}, "name", "2024"),
        ({"batch": {"global": 0}}, "batch.global", "0"),
        ({"batch": {"micro": "big"}}, "batch.micro", "'big'"),
        ({"train": {"epochs": 0}}, "train.epochs", "0"),
        ({"log": {"writers": [3]}}, "log.writers.0", "3"),
        ({"task": {"kind": "toy", "hidden": "wide"}}, "task.hidden", "'wide'"),
        ({"task": {"kind": "classification", "channels": 2}}, "task.channels", "2"),
        ({"task": {"kind": "classification", "top_k": 0}}, "task.top_k", "0"),
        ({"task": "toy"}, "task", "'toy'"),
    ],
)
def test_a_wrong_value_is_refused_with_file_key_and_value(values, path, shown):
    assert f"file.yaml: {path}: {shown}: " in refusal(TOY | values)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("precision=fp8", ["fp32", "bf16", "fp16"]),
        ("device=tpu", ["auto", "cpu", "cuda"]),
        ("schedule.name=cosin", ["cosine", "linear", "one_cycle"]),
        ("parallel.strategy=zero", ["ddp", "single"]),
        ("data.on_error=ignore", ["raise", "skip"]),
    ],
)
def test_a_wrong_choice_is_refused_with_those_there_are(override, allowed):
    text = refusal(TOY, [override])
    assert all(f"'{choice}'" in text for choice in allowed)


@pytest.mark.parametrize(
    "override", ["optim.lr=yes", "seed=true", "batch.global=on", "optim.clip_norm=true", "task.hidden=true"]
)
def test_a_truth_value_is_no_number(override):
    assert f"command line: {override.partition('=')[0]}: True" in refusal(TOY, [override])


def test_an_infinite_learning_rate_is_refused():
    assert "optim.lr: inf" in refusal(TOY, ["optim.lr=.inf"])


def test_the_task_is_needed():
    assert "file.yaml: task: is missing" in refusal({})
    assert "task.kind" in refusal({"task": {}})
    assert "task.kind" in refusal({"task": {"hidden": 3}})


@pytest.mark.parametrize(("wrong", "right"), [("toyy", "toy"), ("clasification", "classification")])
def test_an_unknown_kind_is_refused_with_the_nearest_and_all_there_are(wrong, right):
    text = refusal({"task": {"kind": wrong}})
    assert f"file.yaml: task.kind: {wrong!r}" in text
    assert f"did you mean {right}?" in text
    for kind in ("toy", "classification", "FILE.py:"):
        assert kind in text


@pytest.mark.parametrize("kind", [3, None, True, 2.5, ["toy"], {"toy": 1}, []])
def test_a_kind_that_is_no_text_is_refused(kind):
    assert f"file.yaml: task.kind: {kind!r}" in refusal({"task": {"kind": kind}})


@pytest.mark.parametrize(
    "values",
    [
        {3: 4},
        {"optim": {3: 4}},
        {"task": {"kind": "toy", 3: 4}},
        {"task": {"kind": "own.py:Mine", 3: 4}},
        {None: 1},
        {True: 1},
    ],
)
def test_a_key_that_is_no_text_is_refused(values):
    assert "file.yaml: " in refusal(TOY | values)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../../evil", "/tmp/evil", "a/b", "a\\b", "a\nb", "a\0b", "x" * 201]
)
def test_a_name_that_is_not_one_folder_is_refused(name):
    text = refusal(TOY | {"name": name})
    assert f"file.yaml: name: {name!r} cannot be the name of a folder in runs/" in text
    assert "--run-dir" in text


@pytest.mark.parametrize("name", ["a", "..a", "a b", "caf\u00e9", ".hidden", "x" * 200])
def test_a_name_that_is_one_folder_is_taken(name):
    assert toy(name=name).name == name


@pytest.mark.parametrize("text", ["eval/loss", "max loss", "best eval/loss", "max eval/", "max eval/a b", ""])
def test_what_keep_best_wants_is_said_in_words(text):
    found = refusal(TOY | {"checkpoint": {"keep_best": text}})
    assert (
        f"file.yaml: checkpoint.keep_best: {text!r} does not say which result is best; "
        "write `max eval/NAME` or `min eval/NAME`" in found
    )


# ---- keys that exclude each other


@pytest.mark.parametrize("other", [{"per_rank": 4}, {"per_rank": 4, "accumulate": 2}, {"accumulate": 2}])
def test_both_forms_of_the_batch_are_refused(other):
    text = refusal(TOY | {"batch": {"global": 8} | other})
    assert "file.yaml: batch: " in text
    assert "global" in text
    assert "per_rank" in text


def test_accumulate_needs_per_rank_and_per_rank_is_the_micro_batch():
    assert "per_rank" in refusal(TOY | {"batch": {"accumulate": 2}})
    assert "micro" in refusal(TOY | {"batch": {"per_rank": 2, "micro": 2}})


def test_a_micro_batch_above_the_global_batch_is_refused_with_both():
    text = refusal(TOY | {"batch": {"global": 8, "micro": 16}})
    assert "batch: " in text
    assert "16" in text
    assert "8" in text
    assert toy(batch={"global": 8, "micro": 8}).batch.micro == 8


def test_epochs_and_steps_exclude_each_other():
    assert "file.yaml: train: " in refusal(TOY | {"train": {"epochs": 2, "steps": 3}})
    assert "file.yaml: train: " in refusal(TOY | {"train": {"eval_every_epochs": 0, "eval_every_steps": 0}})


@pytest.mark.parametrize("names", [("a", "a"), ("default",), ("a", "default")])
def test_groups_have_names_of_their_own(names):
    assert "group names" in refusal(TOY | {"optim": {"groups": [{"name": name, "match": ["*"]} for name in names]}})


# ---- all at once, and where each comes from


def test_all_errors_are_reported_at_once():
    values = {
        "task": {"kind": "toy", "hiden": 3, "layers": 0},
        "presicion": "bf16",
        "optim": {"lr": "fast", "groups": [{"name": "a", "match": ["x"], "lrr": 1}]},
        "batch": {"global": 8, "per_rank": 2},
        "train": {"epochs": 1, "steps": 1},
        "log": {"every_steps": 0},
    }
    text = refusal(values, ["nonsense", "seed=-1", "name=[1", "data.worker=2"])
    for part in [
        "file.yaml: task.hiden:",
        "file.yaml: task.layers: 0",
        "file.yaml: presicion:",
        "file.yaml: optim.lr: 'fast'",
        "file.yaml: optim.groups.0.lrr:",
        "file.yaml: batch:",
        "file.yaml: train:",
        "file.yaml: log.every_steps: 0",
        "command line: 'nonsense'",
        "command line: seed: -1",
        "command line: name:",
        "command line: data.worker:",
    ]:
        assert text.count(part) == 1, part


def test_a_wrong_kind_does_not_hide_other_errors():
    text = refusal({"task": {"kind": "toyy"}, "seed": -1})
    assert "task.kind" in text
    assert "seed" in text
    assert "seed" in refusal({"seed": -1})


def test_an_error_names_the_command_line_where_it_comes_from_there():
    text = refusal(
        TOY | {"optim": {"lr": "fast"}, "seed": -1},
        ["seed=-2", "optim.clip_norm=x", "log={every_steps: 0}", "task.hiden=1"],
    )
    for part in (
        "file.yaml: optim.lr: 'fast'",
        "command line: seed: -2",
        "command line: optim.clip_norm: 'x'",
        "command line: log.every_steps: 0",
        "command line: task.hiden",
    ):
        assert part in text
    assert "file.yaml: seed" not in text
    assert "command line: task.kind: 'toyy'" in refusal(TOY, ["task.kind=toyy"])


@pytest.mark.parametrize(
    "overrides", [["batch.global=4", "batch.per_rank=2"], ["optim.lr.x=3"], ["optim.groups.0.lr=3"], ["a.=3"]]
)
def test_a_file_is_not_blamed_for_what_the_command_line_alone_brought(overrides):
    text = refusal(TOY, overrides)
    assert "command line: " in text
    assert "file.yaml" not in text


def test_an_error_in_a_recipe_or_file_names_it(write):
    path = write("task: {kind: toy}\nseed: -1")
    assert f"{path}: seed: -1" in refused_load(path)


# ---- targets


@pytest.mark.parametrize(("wrong", "right"), [("digit", "digits"), ("tyo", "toy"), ("image_folders", "image_folder")])
def test_an_unknown_recipe_is_refused_with_the_nearest_and_all_there_are(wrong, right):
    text = refused_load(wrong)
    assert repr(wrong) in text
    assert f"did you mean {right}?" in text
    assert all(name in text for name in recipes())


@pytest.mark.parametrize("target", ["nowhere/x.yaml", "nowhere/x.yml", "nowhere/x.py:Mine", "nowhere/x.py"])
def test_a_missing_file_is_refused_with_its_path(target):
    text = refused_load(target)
    assert "no such file" in text
    assert target.partition(":")[0] in text


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "x.yaml").mkdir()
    assert "no such file" in refused_load(tmp_path / "x.yaml")


def test_a_python_file_needs_the_name_of_a_class(write):
    path = write("class Mine: pass", "own.py")
    for target in (path, f"{path}:"):
        assert f"{path}:" in refused_load(target)


@pytest.mark.parametrize(
    "text",
    [
        "task: {kind: toy",
        "task: [",
        "a: b: c",
        "\ttask: x",
        "task: \x00",
        "task: !!python/object:os.system {}",
        "? [1]\n: 2",
    ],
)
def test_a_file_that_is_not_yaml_is_refused_with_its_path(text, write):
    path = write(text)
    found = refused_load(path)
    assert path in found
    assert "not YAML" in found


@pytest.mark.parametrize("text", ["", "- 1", "3", "null", "# nothing", "toy"])
def test_a_file_without_sections_is_refused_with_its_path(text, write):
    path = write(text)
    assert f"{path}: not a YAML mapping" in refused_load(path)


@pytest.mark.parametrize(
    "text", [b"\xff\xfe\x00a", "name: caf\u00e9".encode("latin1"), b"task: {kind: toy}\nname: 2020-13-45"]
)
def test_a_file_that_cannot_be_read_is_refused_with_its_path(text, write):
    path = write(text)
    assert path in refused_load(path)


# ---- to YAML and back


@pytest.mark.parametrize("name", sorted(recipes()))
def test_recipes_survive_a_file(name, write):
    assert load(write(to_yaml(load(name)))) == load(name)


def full():
    return parse(
        {
            "name": "a: b # c",
            "seed": 2**40,
            "task": {"kind": "toy", "hidden": 3},
            "data": {"train": "0123", "eval": "null", "on_error": "skip"},
            "batch": {"global": 96, "micro": 8},
            "train": {"steps": 7, "eval_every_steps": 0},
            "optim": {
                "name": "SGD",
                "lr": 1e-05,
                "weight_decay": 1e-10,
                "clip_norm": None,
                "lr_scaling": "sqrt",
                "groups": [{"name": "no", "match": ["*.bias", "?"], "lr": 3e-7, "weight_decay": 0.0}],
                "args": {"momentum": 0.1 + 0.2, "nesterov": True, "betas": [0.9, 1e-8], "x": None, "y": {"z": "1e-4"}},
            },
            "schedule": {"name": "polynomial", "warmup_steps": 5, "end_factor": 1 / 3, "power": 2},
            "precision": "bf16",
            "parallel": {"strategy": "single", "timeout_s": 0.5},
            "log": {"every_steps": 3, "writers": ["text_log", "json_lines"]},
        }
    )


def test_every_value_survives_a_file(write):
    assert load(write(to_yaml(full()))) == full()


def test_the_file_has_every_key_as_users_write_it():
    found = yaml.safe_load(to_yaml(toy()))
    assert list(found) == list(RunConfig.model_fields)
    assert list(found["batch"]) == ["global", "micro", "per_rank", "accumulate"]
    assert found["optim"]["clip_norm"] is None


def test_a_run_directory_gives_its_config_back(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(full()))
    assert read_run(tmp_path) == full()


def test_a_folder_without_config_is_no_run(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="not a run directory") as caught:
            read_run(folder)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "task: ["])
def test_a_damaged_config_of_a_run_is_refused_with_its_path(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_run(tmp_path)
    assert str(tmp_path) in str(caught.value)


# ---- what determines the training


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "device=cpu",
        "data.workers=3",
        "batch.micro=8",
        "log.every_steps=1",
        "log.writers=[text_log,json_lines]",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=1",
        "parallel.strategy=single",
        "parallel.timeout_s=5",
        "train.epochs=99",
        "train.min_steps=99",
        "train.eval_every_epochs=1",
    ],
)
def test_how_a_run_is_run_does_not_determine_it(override):
    assert load("toy", [override]) != load("toy")
    assert training_keys(load("toy", [override])) == training_keys(load("toy"))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("optim.lr=0.02", "optim.lr"),
        ("optim.name=SGD", "optim.name"),
        ("optim.weight_decay=0.5", "optim.weight_decay"),
        ("optim.clip_norm=1", "optim.clip_norm"),
        ("optim.lr_scaling=linear", "optim.lr_scaling"),
        ("optim.reference_batch=64", "optim.reference_batch"),
        ("optim.args.eps=0.5", "optim.args.eps"),
        ("optim.groups=[{name: a, match: ['*'], lr: 1}]", "optim.groups"),
        ("batch.global=51", "batch.global"),
        ("schedule.name=cosine", "schedule.name"),
        ("schedule.warmup_steps=3", "schedule.warmup_steps"),
        ("schedule.warmup_share=0.5", "schedule.warmup_share"),
        ("precision=bf16", "precision"),
        ("data.train=other", "data.train"),
        ("data.drop_last=true", "data.drop_last"),
        ("data.on_error=skip", "data.on_error"),
        ("data.group_by_length=50", "data.group_by_length"),
        ("task.hidden=11", "task.hidden"),
    ],
)
def test_what_changes_the_weights_determines_the_run(override, key):
    old, new = training_keys(load("toy")), training_keys(load("toy", [override]))
    assert [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)] == [key]


def test_warm_up_is_given_in_one_way():
    assert "file.yaml: schedule: give either warmup_steps or warmup_share" in refusal(
        TOY | {"schedule": {"warmup_steps": 3, "warmup_share": 0.1}}
    )
    assert "schedule.warmup_share: 1.5" in refusal(TOY | {"schedule": {"warmup_share": 1.5}})
    found = load("digits", ["schedule.warmup_share=0.25"])
    assert (found.schedule.warmup_steps, found.schedule.warmup_share) == (0, 0.25)  # instead of the recipe's 20 steps


def test_least_steps_go_with_epochs():
    assert "give either min_steps or steps" in refusal(TOY | {"train": {"min_steps": 2, "steps": 3}})
    found = toy("train.steps=3", train={"epochs": 2, "min_steps": 9})
    assert (found.train.epochs, found.train.min_steps, found.train.steps) == (None, None, 3)


# ---- what suits a task where nothing is said


TEXT = {"task": {"kind": "text"}}


def suited(values, *overrides):
    found = parse(values, "file.yaml", overrides)
    return found.optim.lr, found.train.epochs, found.train.min_steps, found.schedule.name, found.schedule.warmup_share


def test_text_has_rate_and_length_that_suit_its_model():
    scratch, fine, bert = suited(TEXT), suited(TEXT, "task.model=x"), suited(TEXT, "task.scratch.architecture=bert")
    assert scratch == suited({"task": {"kind": "text"}}) == suited(load("text").model_dump(by_alias=True))
    assert scratch[0] > bert[0] > fine[0]  # the rates
    assert all(one[1:] == (one[1], one[2], "linear", 0.1) and one[1] and one[2] for one in (scratch, fine, bert))
    assert suited(TOY) == (1e-3, None, None, "constant", None)


def test_what_is_given_is_not_suggested():
    rate, epochs, least, *_ = suited(TEXT, "task.model=x")
    assert suited(TEXT, "task.model=x", "train.epochs=1") == (rate, 1, None, "linear", 0.1)
    assert suited(TEXT, "task.model=x", "train.steps=7") == (rate, None, None, "linear", 0.1)
    assert suited(TEXT | {"train": {"steps": 7}}, "task.model=x") == (rate, None, None, "linear", 0.1)
    assert suited(TEXT | {"train": {"min_steps": 7}}, "task.model=x") == (rate, epochs, 7, "linear", 0.1)
    assert suited(TEXT | {"schedule": {"warmup_steps": 0}}, "task.model=x") == (rate, epochs, least, "linear", None)
    assert suited(TEXT | {"schedule": {"name": "cosine"}}, "task.model=x") == (rate, epochs, least, "cosine", None)
    found = parse(TEXT | {"optim": {"name": "SGD"}})
    assert (found.optim.lr, found.optim.clip_norm) == (1e-3, None)
    assert parse(TEXT | {"optim": {"clip_norm": None}}).optim.clip_norm is None


def test_what_was_suggested_is_recorded_and_read_back_alone(write):
    kept = yaml.safe_load(to_yaml(parse(TEXT)))
    kept["schedule"].pop("warmup_share")
    kept["train"].pop("min_steps")
    found = parse(kept, needs_task=False)
    assert (found.train.min_steps, found.schedule.warmup_share) == (None, None)


@pytest.mark.parametrize(
    ("below", "above", "kept"),
    [
        ("{global: 64, micro: 8}", "{per_rank: 4}", {"per_rank": 4}),
        ("{per_rank: 4, accumulate: 2}", "{global: 64}", {"global_": 64}),
        ("{global: 64, micro: 8}", "{micro: 4}", {"global_": 64, "micro": 4}),
    ],
)
def test_the_batch_of_a_file_takes_the_place_of_the_extended_files(tmp_path, below, above, kept):
    (tmp_path / "below.yaml").write_text(f"task: {{kind: toy}}\nbatch: {below}\n")
    (tmp_path / "above.yaml").write_text(f"extends: below.yaml\nbatch: {above}\n")
    batch = load(str(tmp_path / "above.yaml")).batch
    assert batch.model_dump(exclude_none=True) == kept


def test_a_checkpoint_to_begin_with_needs_its_run():
    message = refusal(TOY | {"train": {"init_checkpoint": "best"}})
    assert "train: init_checkpoint needs the directory of a run in init_from" in message


def test_a_wrong_section_is_told_and_nothing_is_suggested():
    assert "task.max_length" in refusal({"task": {"kind": "text", "max_length": "x"}})
    assert "optim" in refusal(TEXT | {"optim": 3})


def test_the_keys_that_determine_a_training_are_these():
    keys = {key for key in training_keys(load("toy")) if not key.startswith("task.")}
    assert keys == {
        "seed",
        "precision",
        *(f"data.{key}" for key in ("train", "eval", "fold", "on_error", "drop_last", "group_by_length", "cache_size")),
        *(f"data.{key}" for key in ("balance", "samples_per_epoch")),
        *(f"batch.{key}" for key in ("global", "per_rank", "accumulate")),
        *(f"train.{key}" for key in ("ema_decay", "init_from", "init_checkpoint", "init_skip", "unfreeze")),
        *(f"optim.{key}" for key in ("name", "lr", "weight_decay", "clip_norm", "lr_scaling", "reference_batch")),
        *(f"optim.{key}" for key in ("layer_decay", "groups")),
        *(f"schedule.{key}" for key in ("name", "warmup_steps", "warmup_share", "end_factor")),
        *(f"schedule.{key}" for key in ("step_epochs", "gamma", "power", "plateau")),
        *(f"parallel.{key}" for key in ("param_dtype", "reduce_dtype", "virtual_ranks")),
        "compute.matmul_precision",
    }


def test_another_task_determines_the_run():
    old, new = training_keys(load("toy")), training_keys(parse({"task": {"kind": "classification"}}))
    assert old["task.kind"] != new["task.kind"]


def test_a_recorded_config_determines_the_same_as_the_one_that_was_given():
    # from Python, values may be tuples, which YAML reads back as lists
    original = parse(TOY | {"optim": {"args": {"betas": (0.9, 0.95)}}})
    assert training_keys(parse(yaml.safe_load(to_yaml(original)))) == training_keys(original)


# ---- the batch at a first launch


@pytest.mark.parametrize(
    ("per_rank", "accumulate", "world", "expected"), [(4, 2, 3, 24), (4, None, 3, 12), (1, 1, 1, 1), (32, 4, 8, 1024)]
)
def test_per_rank_and_accumulate_resolve_to_the_global_batch_of_the_first_launch(per_rank, accumulate, world, expected):
    batch = toy(batch={"per_rank": per_rank, "accumulate": accumulate}).batch.resolve(world)
    assert (batch.global_, batch.micro, batch.per_rank, batch.accumulate) == (expected, per_rank, None, None)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_given_global_batch_does_not_depend_on_the_world(world):
    batch = toy(batch={"global": 96, "micro": 8}).batch
    assert batch.resolve(world) == batch


def test_without_a_batch_there_is_a_default_one():
    batch = toy().batch.resolve(4)
    assert batch.global_ == toy().batch.resolve(1).global_ > 0
    assert batch.micro is None


@pytest.mark.parametrize(
    "section", [{"micro": 8}, {"global": 64, "micro": 64}, {"per_rank": 64}, {"global": 5, "micro": 5}, {}]
)
def test_a_resolved_batch_can_be_recorded_and_read_again(section):
    found = toy(batch=section)
    resolved = found.model_copy(update={"batch": found.batch.resolve(2)})
    assert parse(yaml.safe_load(to_yaml(resolved))) == resolved


# ---- import


def test_reading_a_config_imports_no_torch():
    code = (
        "import sys; from lockstep.configs.config_file import load; load('toy'); "
        "print([name for name in ('torch', 'torchmetrics', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert result.stdout.strip() == "[]"


# ---- anything at all

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=15)
SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["toy", "classification", "own.py:Mine", "SGD", "cosine", "1e-4", "fp16", "skip"]),
)
KEYS = st.one_of(st.text(max_size=6), st.integers(-2, 2), st.sampled_from(["kind", "name", "lr", "global", "global_"]))
ANYTHING = st.recursive(
    SIMPLE, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=5
)
WHOLE = st.integers(1, 64)


def is_section(annotation):
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def values_of(annotation):
    """What may stand there, or anything at all."""
    if is_section(annotation):
        return st.one_of(sections(annotation), ANYTHING)
    inner = [values_of(argument) for argument in get_args(annotation) if is_section(argument) or get_args(argument)]
    if not inner:
        return st.one_of(WHOLE, ANYTHING)
    if get_origin(annotation) is list:
        return st.one_of(st.lists(*inner, max_size=2), ANYTHING)
    return st.one_of(*inner, st.dictionaries(KEYS, inner[-1], max_size=2), ANYTHING)


def sections(model):
    """Dicts with some of the keys of a section, and one that may be any."""
    known = {field.alias or name: values_of(field.annotation) for name, field in model.model_fields.items()}
    return st.builds(
        lambda found, more: found | more,
        st.fixed_dictionaries({}, optional=known),
        st.dictionaries(KEYS, ANYTHING, max_size=1),
    )


OPTIONS = {kind: registry.options_class(kind) for kind in registry.kinds()}
TASKS = st.one_of(
    ANYTHING,
    st.fixed_dictionaries(
        {"kind": st.one_of(SIMPLE, ANYTHING)}, optional={"hidden": SIMPLE, "x": ANYTHING, 3: ANYTHING}
    ),
    *(
        st.builds(lambda found, kind: found | {"kind": kind}, sections(model), st.just(kind))
        for kind, model in OPTIONS.items()
    ),
)


@FIXED
@given(sections(RunConfig), TASKS)
def test_values_are_accepted_or_refused_as_wrong_usage(values, task):
    values = values | {"task": task}
    try:
        found = parse(values)
    except UsageError as error:
        assert str(error).count("\n") > 0  # noqa: PT017 - it is no failure, but must say something
    else:
        assert isinstance(found, RunConfig)


PATHS = (
    "seed optim.lr optim.groups optim.groups.0.lr optim.args.x task task.kind task.hidden batch train.steps "
    "a.b . data..x"
)
OVERRIDES = st.one_of(
    st.text(max_size=12),
    st.tuples(st.sampled_from(PATHS.split()), st.one_of(st.text(max_size=8), SIMPLE.map(str), ANYTHING.map(repr))).map(
        "=".join
    ),
)


@FIXED
@given(st.lists(OVERRIDES, max_size=3))
def test_overrides_are_accepted_or_refused_as_wrong_usage(overrides):
    try:
        assert isinstance(parse(TOY, "file.yaml", overrides), RunConfig)
    except UsageError as error:
        assert str(error).count("\n") > 0  # noqa: PT017 - as above


def some(**keys):
    return st.fixed_dictionaries({}, optional=keys)


ARGUMENTS = st.one_of(
    st.floats(allow_nan=False), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.booleans()
)
NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\"), min_size=1, max_size=8)
RIGHT = some(
    name=NAMES.filter(lambda name: name.strip() not in ("", ".", "..")),
    seed=st.integers(0, 2**80),
    data=some(train=st.one_of(st.none(), st.text(max_size=8)), workers=WHOLE, drop_last=st.booleans()),
    batch=some(**{"global": WHOLE}),
    optim=some(
        lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        clip_norm=st.none(),
        args=st.dictionaries(st.text(max_size=5), ARGUMENTS, max_size=3),
    ),
    schedule=some(name=st.sampled_from(["cosine", "step"]), gamma=st.floats(1e-300, 1e300), end_factor=st.floats(0, 1)),
)


@settings(FIXED, max_examples=8)
@given(RIGHT)
def test_whatever_is_accepted_survives_yaml(values):
    found = parse(TOY | values)
    again = parse(yaml.safe_load(to_yaml(found)))
    assert again == found
    assert training_keys(again) == training_keys(found)
