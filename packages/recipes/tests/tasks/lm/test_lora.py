"""Adapters: the training is that of peft in a plain loop, and checkpoints and exports have what trains."""

import json
import shutil
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep import Trainer
from lockstep.cli.export import next_step
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep_lab.plan.command import facts_with_or_without_data
from lockstep_lab.plan.estimate import estimate
from lockstep_lab.plan.inputs import Machines, Setting
from tests import lm_cases, runs
from tests.lm_cases import small_task
from tests.ranks import run_ranks
from tests.selection import mainly

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
KINDS = ("llama", "gpt2")
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}  # peft's own for these architectures
STEPS, BATCH, RATE = 6, 8, 0.5  # the last entry of the log is that of step 6 alone


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("corpus"))


def save_base(folder, corpus, kind, seed=1):
    """A "pretrained" model: new weights that are far from zero, and its tokenizer."""
    task = small_task(corpus, **lm_cases.MODELS[kind])
    torch.manual_seed(seed)
    model = task.model()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bases(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_base(folder / kind, corpus, kind) for kind in KINDS}


def options_of(corpus, base, **lora):
    return {"train": corpus, "model": base, "lora": {"rank": 4, **lora}}


def settings(**sections):
    batch = {"global": BATCH, "micro": sections.pop("micro", BATCH)}
    train = {"steps": STEPS} | sections.pop("train", {})
    return runs.config(batch=batch, train=train, optim={"name": "SGD", "lr": RATE, "weight_decay": 0.0}, **sections)


# ---- the training


def in_peft(options, kind, **config):
    """A function that makes peft's model, with the adapters that the task begins with."""

    def make():
        begun = small_task(**options).model().state_dict()
        base = AutoModelForCausalLM.from_pretrained(options["model"])
        found = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[kind], "task_type": "CAUSAL_LM", **config}
        model = peft.get_peft_model(base, peft.LoraConfig(**found))
        unknown = model.load_state_dict(
            {f"base_model.model.{name}": value for name, value in begun.items()}, strict=False
        )
        assert unknown.unexpected_keys == ["base_model.model.frozen_base._extra_state"]
        return model

    return make


@pytest.fixture(scope="module")
def plain(corpus, bases):
    known = {}

    def of(kind):
        if kind not in known:
            options = options_of(corpus, bases[kind])
            make = in_peft(options, kind, fan_in_fan_out=kind == "gpt2")
            weights, losses = lm_cases.by_hand(options, STEPS, BATCH, RATE, make)
            adapters = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
            known[kind] = {name: value for name, value in adapters.items() if "lora_" in name}, losses
        return known[kind]

    return of


CASES = [
    (kind, world, strategy, chunk)
    for kind in KINDS
    for world, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"))
    for chunk in (None, 8)
]
CHOSEN = [("gpt2", 2, "fsdp", 8)]


@pytest.mark.parametrize(("kind", "world", "strategy", "chunk"), mainly(CHOSEN, CASES))
def test_adapters_train_as_those_of_peft_document_by_document(corpus, bases, plain, kind, world, strategy, chunk):
    options = {**options_of(corpus, bases[kind]), "loss_chunk": chunk}
    spread = {"parallel": {"strategy": strategy}} if world > 1 else {}
    (weights, results), *_ = run_ranks(world, lm_cases.train, options, settings(micro=2, **spread))
    begun = small_task(**options).model().state_dict()
    trained = {name: value for name, value in weights.items() if "lora_" in name}
    assert weights.keys() - trained.keys() <= {"frozen_base._extra_state"}
    assert max(float((trained[name] - begun[name]).abs().max()) for name in trained) > 1e-3
    bound = 1e-8 if (kind, world) == ("llama", 3) else 1e-10  # transformers' RMSNorm rounds to float32
    assert lm_cases.difference(trained, plain(kind)[0]) < bound
    assert results["train/loss"] == pytest.approx(plain(kind)[1][-1], rel=bound)


def test_the_gradient_of_a_packed_batch_is_that_of_its_documents(corpus, bases):
    """With adapters that are not zero, also of norms (DoRA), and scaled by the root of the rank."""
    task = small_task(**options_of(corpus, bases["llama"], targets="all-linear", dora=True, rslora=True))
    model, data = task.model().double().train(), task.train_data()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("magnitude" in name for name in trained)
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = [data[index] for index in range(len(data) - 6, len(data))]
    assert max(int(row.documents[-1]) for row in rows) > 0
    packed = task.loss(model, task.collate(rows))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    model.zero_grad()
    single = torch.stack([lm_cases.loss_of_each(model, row)[0] for row in rows]).sum()
    single.backward()
    assert packed.item() == pytest.approx(single.item(), rel=1e-10)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if name in trained:
            assert float((parameter.grad - gradients[name]).abs().max()) < 1e-10 * largest, name
        else:
            assert parameter.grad is None


# ---- checkpoints


def lora_config(corpus, base, **sections):
    """The config of a run, with a moving average and evaluated questions."""
    lora = {"rank": 4, "dropout": 0.1} | sections.pop("lora", {})
    task = {"kind": "lm", "model": base, "length": 32, "new_tokens": 4, "prompts": ["the cat"], "lora": lora}
    train = {"steps": 4, "eval_every_steps": 4, "ema_decay": 0.5} | sections.pop("train", {})
    return runs.config(task=task, data={"train": corpus}, batch={"global": 8, "micro": 4}, train=train, **sections)


@pytest.fixture(scope="module")
def run_dir(corpus, bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "lora"
    Trainer(lora_config(corpus, bases["llama"]), run_dir=folder, quiet=True).fit()
    return folder


def index_of(run_dir):
    (newest,) = [*(run_dir / "checkpoints").glob("step-00000004")]
    return json.loads((newest / "index.json").read_text())


def test_checkpoints_hold_adapters_and_a_digest(run_dir, bases):
    tensors, values = (index_of(run_dir)[part] for part in ("tensors", "values"))
    kinds = {name.partition(".")[0] for name in tensors}
    assert kinds == {"model", "optimizer", "ema"}
    assert all("lora_" in name for name in tensors)
    assert bases["llama"] in json.dumps(values["model.frozen_base._extra_state"])
    log = (run_dir / "train.log").read_text()
    assert "peft adapters train, the fp32 weights are frozen: rank 4, dropout 0.1" in log
    assert "'the cat' -> '" in log


def fit(config, run_dir):
    """Train on the ranks of `run_ranks`. Returns the final weights."""
    weights = runs.FinalWeights()
    Trainer(config, run_dir=run_dir, quiet=True).fit(None, weights)
    return weights.tensors


def spread_config(corpus, bases, strategy, steps, dtype):
    found = lora_config(corpus, bases["gpt2"], lora={"dropout": 0.0, "base_dtype": dtype}, train={"steps": steps})
    return found | {"parallel": {"strategy": strategy}, "schedule": {"name": "constant", "warmup_steps": 0}}


@pytest.fixture(scope="module")
def whole(corpus, bases, tmp_path_factory):
    """The weights of runs of four steps that nothing interrupts."""
    known = {}

    def of(world, strategy, dtype):
        if (world, strategy, dtype) not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            config = spread_config(corpus, bases, strategy, 4, dtype)
            known[world, strategy, dtype] = run_ranks(world, fit, config, folder)[0]
        return known[world, strategy, dtype]

    return of


SPREADS = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")]
MOVES = [(before, after) for before in SPREADS for after in SPREADS]
CHOSEN_MOVES = [((1, "single"), (2, "ddp"))]


@pytest.mark.parametrize(("before", "after"), mainly(CHOSEN_MOVES, MOVES))
def test_a_run_goes_on_bit_for_bit_and_on_other_ranks(corpus, bases, whole, tmp_path, before, after):
    dtype = "bf16" if before == after else "fp32"  # other numbers of rows round otherwise in bf16
    run_ranks(before[0], fit, spread_config(corpus, bases, before[1], 2, dtype), tmp_path / "run")
    resumed, *_ = run_ranks(after[0], fit, spread_config(corpus, bases, after[1], 4, dtype), tmp_path / "run")
    expected = whole(*before, dtype)
    assert resumed.keys() == expected.keys()
    assert all("lora_" in name for name in resumed)
    largest = max(float((resumed[name] - expected[name]).abs().max()) for name in expected)
    assert largest < 1e-5
    assert largest == 0 or before != after
    done = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(done) == 4


def test_going_on_over_other_weights_is_refused(corpus, bases, tmp_path):
    base = shutil.copytree(bases["llama"], tmp_path / "base")
    config = lora_config(corpus, str(base))
    Trainer(config, run_dir=tmp_path / "run", quiet=True).fit()
    moved = str(shutil.move(base, tmp_path / "moved"))
    config["train"]["steps"] = 6
    with pytest.raises(UsageError, match=rf"'{base}' cannot be loaded; looked for as a folder"):
        Trainer(config, run_dir=tmp_path / "run", quiet=True, allow_change=["train.steps"]).fit()
    config["task"]["model"] = moved  # the same weights in another place
    allowed = {"quiet": True, "allow_change": ["train.steps", "task.model"]}
    Trainer(config, run_dir=tmp_path / "run", **allowed).fit()
    config["train"]["steps"] = 8
    config["task"]["model"] = other = save_base(tmp_path / "other", corpus, "llama", seed=2)
    said = rf"the adapters belong to the weights of {moved} \(digest \w{{32}}\), but {other} has the digest \w{{32}}"
    with pytest.raises(UsageError, match=said):
        Trainer(config, run_dir=tmp_path / "run", **allowed).fit()
    config["task"]["model"] = bases["gpt2"]
    with pytest.raises(UsageError, match="gpt2 has none of the weights of LlamaForCausalLM"):
        Trainer(config, run_dir=tmp_path / "run", **allowed).fit()


# ---- exports and predictions


def of_run(run_dir, corpus, bases):
    return Trainer(lora_config(corpus, bases["llama"]), run_dir=run_dir, quiet=True)


def test_exports_are_what_peft_and_transformers_load(run_dir, corpus, bases, tmp_path, capsys):
    trainer = of_run(run_dir, corpus, bases)
    assert trainer.export(tmp_path / "out").name == "adapter_model.safetensors"
    trainer.export(tmp_path / "whole", merge=True)
    assert "warning" not in capsys.readouterr().err
    trainer.evaluate()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the cat sees the dog", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(bases["llama"])
    untrained = base(ids).logits
    expected = trainer.model(ids).logits
    assert not torch.allclose(untrained, expected, atol=1e-3)
    whole, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for model in (
        peft.PeftModel.from_pretrained(base, tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        whole,
    ):
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert written < 0.2 * (tmp_path / "whole" / "model.safetensors").stat().st_size
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == bases["llama"]
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "PeftModel.from_pretrained" in card
    line = next_step(tmp_path / "out")
    assert f"AutoModelForCausalLM.from_pretrained(\"{bases['llama']}\"), '{tmp_path / 'out'}')" in line
    exec(line, {})
    assert capsys.readouterr().out.startswith("The")
    assert "library_name: transformers" in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ["wte", "c_attn"]},
        pytest.param({"targets": "all-linear", "dora": True, "rslora": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_exports_of_other_kinds_of_adapters(corpus, bases, tmp_path, lora):
    config = lora_config(corpus, bases["gpt2"], lora=lora, train={"ema_decay": None})
    trainer = Trainer(config, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    trainer.export(tmp_path / "out")
    ids = torch.arange(9)[None]
    base = AutoModelForCausalLM.from_pretrained(bases["gpt2"])
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    expected = trainer.model(ids).logits
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    if "dora" in lora:
        trainer.export(tmp_path / "whole", merge=True)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        assert torch.allclose(whole(ids).logits, expected, atol=1e-4)
    else:
        with pytest.raises(UsageError, match=r"--merge: transformer.wte shares its weights with a different layer"):
            trainer.export(tmp_path / "whole", merge=True)


def test_a_run_without_adapters_has_nothing_to_merge(corpus, tmp_path):
    config = lora_config(corpus, None)
    config["task"] |= lm_cases.SMALL | {"model": None, "lora": None, "vocab_size": 300}
    trainer = Trainer(config, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    with pytest.raises(UsageError, match="--merge: the model has no adapters"):
        trainer.export(tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_questions_are_answered_with_adapters(bases, tmp_path):
    rows = [{"question": f"{number} and 1?", "answer": f"#### {number + 1}"} for number in range(12)]
    file = lm_cases.json_lines(tmp_path / "qa.jsonl", rows)
    config = lora_config(file, bases["llama"])
    config["task"] |= {"exact_match": 3, "eval_fraction": 0.3}
    trainer = Trainer(config, run_dir=tmp_path / "run", quiet=True)
    assert 0 <= trainer.fit()["eval/exact_match"] <= 1
    found = []
    trainer.predict_rows(lambda rows, readable: found.extend(rows), ["3 and 1?"], 1)
    assert isinstance(found[0]["text"], str)


# ---- options


def test_the_command_line_has_a_rate_for_adapters():
    config = config_file.load("lm", ["task.model=somewhere", "task.lora.rank=8"])
    assert config.optim.lr == 2e-4
    assert config.task["lora"]["rank"] == 8
    with pytest.raises(
        UsageError, match=r"lora needs a pretrained model: set model; to use a run, export it first: lockstep export"
    ):
        config_file.load("lm", ["task.lora.rank=8"])


def test_what_cannot_have_adapters_is_refused(corpus, bases, monkeypatch):
    with pytest.raises(
        UsageError, match=r"task.lora: adapters need a pretrained model, but task.config makes a new one"
    ):
        small_task(corpus, config=lm_cases.LLAMA, lora={"rank": 2}).model()
    with pytest.raises(UsageError, match=r"peft refuses the model: \w+: Target modules.*\n.*q_proj"):
        small_task(**options_of(corpus, bases["llama"], targets=["query"])).model()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"task.lora: peft is not installed\n.*pip install peft"):
        small_task(**options_of(corpus, bases["llama"])).model()


@pytest.mark.parametrize("dtype", mainly([], ["fp32", "bf16"]))
def test_a_plan_counts_gradients_and_optimizer_state_of_adapters_alone(corpus, dtype):
    lora = [
        f"task.lora={{rank: 4, base_dtype: {dtype}}}",
        "task.length=32",
        "task.vocab_size=300",
        "train.ema_decay=0.9",
    ]
    config = config_file.load("lm", [f"data.train={corpus}", f"task.config={json.dumps(lm_cases.LLAMA)}", *lora])
    facts = facts_with_or_without_data(config, precisions=("fp32",), recompute=(False,))
    task = small_task(corpus, config=lm_cases.LLAMA)
    whole = sum(parameter.numel() for parameter in task.model().parameters())
    trained = sum(p.elements for p in facts.parameters if p.trainable)
    assert trained == 2 * (4 * 16 + 16 * 4 + 4 * 16 + 8 * 4)
    found = estimate(facts, Setting(Machines(1, 1), "single", "fp32", 2))
    assert found.memory.parameters_bytes - facts.buffers_bytes == whole * (4 if dtype == "fp32" else 2) + 4 * trained
    assert found.memory.gradients_bytes == 4 * trained
    assert found.memory.averages_bytes == 4 * trained
    assert 8 * trained <= found.memory.optimizer_bytes < 9 * trained + 100
    assert found.checkpoint_bytes < 4 * 5 * trained
