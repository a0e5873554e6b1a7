"""A model of transformers trains as in plain torch, on any ranks; and what cannot be kept is named."""

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

transformers = pytest.importorskip("transformers")

from lockstep import LockstepError, Trainer  # noqa: E402
from lockstep.core.data.order import permute  # noqa: E402
from lockstep_recipes import adapters  # noqa: E402
from tests import runs  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.selection import mainly  # noqa: E402

STEPS, BATCH = 12, 12
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "max_steps": STEPS,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": STEPS,
    "report_to": "none",
}


def samples(count, seed):
    """Sentences of several lengths; two thirds of the tags are missing, and there is a column that no model takes."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(3, 9, (1,), generator=draw))
        words = torch.randint(3, 30, (length,), generator=draw)
        tags = (words > 15).long()
        tags[torch.rand(len(words), generator=draw) < 0.66] = -100
        found.append({"input_ids": words, "labels": tags, "number": number})
    return found


def pad(batch):
    def stacked(name, value):
        columns = [sample[name] for sample in batch]
        return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=value)

    words = stacked("input_ids", 0)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": stacked("labels", -100)}


def model():
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForTokenClassification(config).double()


def accuracy(prediction):
    valid = prediction.label_ids != -100
    found = prediction.predictions.argmax(-1)
    return {"accuracy": (found == prediction.label_ids)[valid].mean(), "sentences": len(found)}


def fit(folder, steps=STEPS, net=None, **sections):
    task = adapters.transformers(
        net if net is not None else model(),
        ARGUMENTS,
        train_dataset=samples(50, 0),
        eval_dataset=samples(21, 1),
        data_collator=pad,
        compute_metrics=accuracy,
    )
    settings = runs.config(train={"steps": steps}, **sections)
    del settings["optim"], settings["batch"]
    return runs.fit(task, settings | {"schedule": {"total_steps": STEPS}}, folder)


def difference(one, other):
    """The gradient of a key's bias is zero, because softmax takes a constant away; AdamW steps by its rounding."""
    one, other = ({name: value for name, value in of.items() if "key.bias" not in name} for of in (one, other))
    return runs.difference(one, other)


def fit_in_shared_folder(strategy, precision="fp32"):
    with runs.shared_folder() as folder:
        return fit_as(folder, strategy, precision)


def fit_as(folder, strategy, precision):
    net = model() if precision == "fp32" else model().float()
    return fit(folder, net=net, parallel={"strategy": strategy}, precision=precision)


def by_hand():
    """Plain torch: the whole global batch at once, by the model's own mean loss. The weights, loss and accuracy."""
    net, data, held_back = model(), samples(50, 0), samples(21, 1)
    kept_out = ("bias", "LayerNorm")
    groups = [
        {"params": [p for name, p in net.named_parameters() if not any(word in name for word in kept_out)]},
        {
            "params": [p for name, p in net.named_parameters() if any(word in name for word in kept_out)],
            "weight_decay": 0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: step / 3 if step < 3 else (STEPS - step) / (STEPS - 3))
    for step in range(STEPS):
        epoch, within = divmod(step, 5)
        order = permute(np.arange(within * BATCH, min(50, (within + 1) * BATCH)), 50, 42, epoch)
        optimizer.zero_grad()
        net(**pad([data[place] for place in order])).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        outputs = net(**(batch := pad(held_back)))
    valid = batch["labels"] != -100
    right = (outputs.logits.argmax(-1) == batch["labels"])[valid].double().mean()
    weights = {name: value.detach() for name, value in net.state_dict().items()}
    return weights, float(outputs.loss), float(right)


RANKS = mainly([(1, "single")], [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")])


@pytest.mark.parametrize(("world", "strategy"), RANKS)
def test_it_trains_as_plain_torch(world, strategy, tmp_path):
    weights, results = fit(tmp_path / "run") if world == 1 else run_ranks(world, fit_in_shared_folder, strategy)[0]
    expected, loss, right = by_hand()
    assert difference(weights, expected) < 1e-10
    assert results["eval/loss"] == pytest.approx(loss, rel=1e-10)
    assert results["eval/accuracy"] == pytest.approx(right, rel=1e-12)
    assert results["eval/sentences"] == 21


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lower_precision_is_the_same_on_two_ranks_to_its_rounding(strategy, tmp_path):
    alone, _ = fit_as(tmp_path / "run", "single", "bf16")
    weights, results = run_ranks(2, fit_in_shared_folder, strategy, "bf16")[0]
    assert difference(weights, alone) < 0.02
    assert results["eval/sentences"] == 21


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_it_goes_on_on_other_ranks_that_share_the_model(world, tmp_path):
    fit(tmp_path / "run", 7)
    weights = run_ranks(world, resumed, tmp_path / "run")[0]
    assert difference(weights, by_hand()[0]) < 1e-10


def resumed(folder):
    return fit(folder, parallel={"strategy": "fsdp"})[0]


def test_arguments_are_an_object_a_mapping_or_a_file(tmp_path):
    given = {"learning_rate": 3e-4, "num_train_epochs": 1.5, "bf16": True, "save_total_limit": 2, "logging_steps": 7}
    (tmp_path / "arguments.yaml").write_text("\n".join(f"{key}: {value}" for key, value in given.items()))
    objects = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
    found = [
        adapters.transformers(model(), args, train_dataset=samples(50, 0), data_collator=pad).implied
        for args in (objects, given, tmp_path / "arguments.yaml")
    ]
    assert found[0] == found[1] == found[2]
    expected = {"optim.lr": 3e-4, "train.steps": 11, "precision": "bf16", "checkpoint.keep_last": 2}  # 1.5 * 7 steps
    expected |= {"log.every_steps": 7, "batch.global": 8, "optim.clip_norm": 1.0, "seed": 42}
    assert expected.items() <= found[0].items()


def test_the_log_says_what_to_do_for_the_largest_batch():
    task = adapters.transformers(model(), {"auto_find_batch_size": True}, train_dataset=samples(5, 0))
    assert "Lockstep halves the micro-batch; `lockstep tune batch`" in task.notes[0]


def test_arguments_without_a_counterpart_are_named_all_at_once():
    given = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5, "optim": "adafactor", "learning_rat": 1e-4}
    with pytest.raises(LockstepError) as caught:
        adapters.transformers(model(), given, train_dataset=samples(5, 0))
    for text in ("label_smoothing_factor=0.1", "neftune_noise_alpha=5", "'adafactor'", "did you mean learning_rate"):
        assert text in str(caught.value)


def test_a_loss_whose_units_are_not_known_is_refused(tmp_path):
    net = model()

    class Odd(type(net)):
        def forward(self, input_ids, attention_mask, labels):
            outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            outputs["loss"] = outputs["loss"].square()
            return outputs

    net.__class__ = Odd
    task = adapters.transformers(net, {}, train_dataset=samples(50, 0), data_collator=pad)
    with pytest.raises(LockstepError, match="not a mean over samples"):
        Trainer({"device": "cpu"}, run_dir=tmp_path / "run", quiet=True).fit(task)
