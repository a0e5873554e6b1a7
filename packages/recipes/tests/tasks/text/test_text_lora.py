"""Adapters in text classification: the training is that of peft in a plain loop, and transformers loads the exports."""

import json
import sys

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from lockstep import Trainer
from lockstep.cli.export import next_step
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from tests import runs, text_cases
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.text_cases import EPS, SMALL, text_task

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
SEEN = ["open a file", "send a message"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A "pretrained" body, with weights that are far from zero, and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    task = text_task(**SMALL)
    torch.manual_seed(1)
    model = task.model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.bert.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return str(folder)


def options_of(base, **lora):
    return {"train": "docstrings", "max_length": 48, "model": base, "lora": {"rank": 4, **lora}}


def in_peft(options):
    """peft's own model, with the adapters and the head that the task begins with."""
    torch.manual_seed(0)
    task = text_task(**options)
    begun = task.model().state_dict()
    plain = AutoModelForSequenceClassification.from_pretrained(options["model"], num_labels=len(task.labels))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"])
    model = peft.get_peft_model(plain, config)
    assert model.load_state_dict(begun, strict=False).unexpected_keys == ["frozen_base._extra_state"]
    return model


def settings(**sections):
    batch = {"global": 24, "micro": 6}
    return runs.config(batch=batch, optim={"args": {"eps": EPS}}, **sections)


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "fsdp")], [(1, "single"), (2, "ddp"), (2, "fsdp")]))
def test_adapters_and_head_train_as_those_of_peft(base, world, strategy):
    options = options_of(base)
    config = settings(train={"steps": 6}, parallel={"strategy": strategy})
    (weights, _), *_ = run_ranks(world, text_cases.train, options, config)
    plain, _ = text_cases.by_hand(options, 6, 24, make=lambda: in_peft(options))
    trained = {name: weights[name] for name in weights if "lora_" in name or "modules_to_save" in name}
    assert len(trained) == 2 * 2 * 2 + 2
    assert weights.keys() - trained.keys() <= {"frozen_base._extra_state"}
    assert text_cases.difference(trained, {name: plain[name] for name in trained}) < 1e-10


def test_a_run_goes_on_and_its_exports_are_loaded(base, tmp_path):
    text = {"kind": "text", "max_length": 48, "model": base, "lora": {"rank": 4, "targets": "all-linear"}}
    both = settings(task=text, data={"train": "docstrings"}, schedule={"name": "constant"})
    for steps in (3, 6):
        trainer = Trainer(both | {"train": {"steps": steps}}, run_dir=tmp_path / "run")
        trainer.fit()
    index = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "index.json").read_text())
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in index["tensors"])
    assert "peft adapters train, the fp32 weights are frozen" in (tmp_path / "run" / "train.log").read_text()
    rows = []
    trainer.predict_rows(lambda found, readable: rows.extend(found), SEEN, 2)
    expected = torch.tensor([list(row["probabilities"].values()) for row in rows])
    trainer.export(tmp_path / "adapters")
    trainer.export(tmp_path / "merged", merge=True)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert whole.config.architectures == ["BertForSequenceClassification"]
    (told,) = pipeline("text-classification", model=str(tmp_path / "merged"))(SEEN[0])
    assert told["label"] == rows[0]["prediction"]
    names = AutoConfig.from_pretrained(tmp_path / "adapters")  # of the labels
    plain = AutoModelForSequenceClassification.from_pretrained(base, config=names)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "adapters")(SEEN, padding=True, return_tensors="pt")
    for model in (whole, peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")):
        found = model.eval()(**tokens).logits.detach().softmax(dim=-1)
        assert float((found - expected).abs().max()) < 1e-5
    names: dict = {}
    exec(next_step(tmp_path / "adapters"), names)
    assert isinstance(names["model"], peft.PeftModel)
    (tmp_path / "adapters" / "config.json").unlink()  # as of a task of one's own, which makes its base itself
    assert "PeftModel.from_pretrained(MODEL," in next_step(tmp_path / "adapters")


def test_a_body_of_16_bits_has_adapters_and_a_head_of_32(base):
    task = text_task(**options_of(base, base_dtype="bf16", dropout=0.1))
    model, data = task.model(), task.train_data()
    formats = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(formats.values()) == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    loss, _ = task.loss(model, task.collate([task.prepare(data[index], 0, True) for index in range(4)]))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_cannot_have_adapters_is_refused(base, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"lora needs a pretrained model: set model"):
        config_file.load("text", ["data.train=docstrings", "task.lora.rank=8"])
    assert config_file.load("text", ["data.train=docstrings", "task.model=a", "task.lora.rank=8"]).optim.lr == 1e-3
    with pytest.raises(UsageError, match=r"peft refuses the model: (.|\n)*layers have names such as (.|\n)*query"):
        text_task(**options_of(base, targets=["q_proj"])).model()
    body = AutoModelForSequenceClassification.from_pretrained(base).bert
    body.pooler = None
    body.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"lacks weights, which adapters cannot replace: bert.pooler.dense.bias"):
        text_task(**options_of(str(tmp_path))).model()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"task.lora: peft is not installed\n.*pip install peft"):
        text_task(**options_of(base)).model()
