"""Text classification against Hugging Face and plain torch, and what it says of bad input."""

import csv
import json
import math
import os
import subprocess
import sys
import zlib

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lockstep import LockstepError, Task, Trainer
from lockstep.core import task_checks
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.text import bag_start, hugging_face, log_header
from lockstep_recipes.tasks.text.embedding_bag import EmbeddingBagConfig
from lockstep_recipes.tasks.text.task import Text
from tests import runs, text_cases
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.text_cases import BAG, SIZES, SMALL, text_task

ROLES = ["mixed", "neg", "pos"]
ROWS = [
    ("good film", "pos"),
    ("bad film", "neg"),
    ("very good", "pos"),
    ("very bad", "neg"),
    ("so so", "mixed"),
    ("neither", "mixed"),
]


def table(path, rows=ROWS, names=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return str(path)


@pytest.fixture
def few(tmp_path):
    """Options of a small task on six texts."""
    return {
        "train": table(tmp_path / "few.csv"),
        "eval_fraction": 0.0,
        "scratch": {"architecture": "bert", "sizes": SIZES, "vocab_size": 200},
        "max_length": 16,
    }


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with a model for three labels and its tokenizer, as `save_pretrained` leaves it."""
    folder = tmp_path_factory.mktemp("pretrained")
    task = text_task(
        table(folder / "few.csv"),
        eval_fraction=0.0,
        scratch={"architecture": "bert", "sizes": SIZES, "vocab_size": 200},
        max_length=16,
    )
    torch.manual_seed(1)
    model = task.model()
    model.save_pretrained(folder / "model")
    task.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


# ---- the same training, however it is cut


@pytest.fixture(scope="module")
def plain():
    return text_cases.by_hand(SMALL, steps=12, global_batch=24)


@pytest.mark.parametrize(("world", "micro"), mainly([(1, 24), (2, 6)], [(1, 6), (2, 6), (2, 12), (1, 24)]))
def test_weights_and_losses_are_those_of_hugging_face_in_plain_torch(plain, world, micro):
    settings = runs.config(
        batch={"global": 24, "micro": micro}, train={"steps": 12}, optim={"args": {"eps": text_cases.EPS}}
    )
    (weights, results), *_ = run_ranks(world, text_cases.train, SMALL, settings)
    assert text_cases.difference(weights, plain[0]) < 1e-10
    assert results["train/loss"] == pytest.approx(sum(plain[1][-2:]) / 2, rel=1e-10)  # since the entry of step 10


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "ddp")], [(2, "ddp"), (2, "fsdp")]))
def test_a_bag_of_embeddings_trains_as_in_plain_torch(world, strategy):
    plain, _ = text_cases.by_hand(BAG, 8, 24, make=text_task(**BAG).model)
    settings = runs.config(
        batch={"global": 24, "micro": 6}, train={"steps": 8}, optim={"args": {"eps": text_cases.EPS}}
    )
    (weights, _), *_ = run_ranks(world, text_cases.train, BAG, settings | {"parallel": {"strategy": strategy}})
    assert text_cases.difference(weights, plain) < 1e-10


def test_class_weights_make_the_weighted_mean_of_cross_entropy():
    weights = {"email": 3.0, "http": 0.25}
    plain, _ = text_cases.by_hand(SMALL, 6, 24, weights)
    settings = runs.config(
        batch={"global": 24, "micro": 5}, train={"steps": 6}, optim={"args": {"eps": text_cases.EPS}}
    )
    (found, _), *_ = run_ranks(2, text_cases.train, SMALL | {"class_weights": weights}, settings)
    assert text_cases.difference(found, plain) < 1e-10


@pytest.mark.exhaustive
def test_causal_model_with_token_weights_is_one_big_batch():
    settings = runs.config(batch={"global": 32, "micro": 6}, train={"steps": 8})
    (weights, _), *_ = run_ranks(2, text_cases.train_causal, settings)
    assert text_cases.difference(weights, text_cases.causal_by_hand(8, 32)) < 1e-10


def test_several_labels_are_binary_cross_entropy(tmp_path):
    rows = [("red round", "red,round"), ("red", "red"), ("plain", ""), ("round thing", "round")]
    task = text_task(
        table(tmp_path / "many.csv", rows),
        multi_label=True,
        eval_fraction=0.0,
        scratch={"architecture": "bert", "sizes": SIZES, "vocab_size": 200},
        max_length=8,
    )
    assert task.labels == ["red", "round"]
    data, model = task.train_data(), task.model()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(4)])
    assert batch["labels"].tolist() == [[1, 1], [1, 0], [0, 0], [0, 1]]
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    wanted = 4 * torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    torch.testing.assert_close(task.loss(model, batch)[0], wanted)
    metrics, update = task_checks.metrics(task)
    update(metrics, batch["labels"], batch)
    values = metrics.compute()
    assert values["accuracy"] == values["macro_f1"] == 1
    assert "red" in task.presenter(task).report(values, [(data[0], batch["labels"][0])])
    assert task.presenter(task).describe(torch.tensor([0.9, 0.2]))["prediction"] == ["red"]


def test_metrics_do_not_check_every_batch(tmp_path):
    """The checks of torchmetrics wait for the device."""
    rows = [("red round", "red"), ("red", "red"), ("plain", "round")]
    task = text_task(table(tmp_path / "few.csv", rows), multi_label=True, eval_fraction=0.0, max_length=8)
    metrics, _ = task_checks.metrics(task)
    assert [metrics[name].validate_args for name in ("accuracy", "macro_f1")] == [False] * 2


def test_class_weights_of_several_labels_are_weights_of_their_presence(tmp_path):
    rows = [("red round", "red,round"), ("red", "red"), ("plain", ""), ("round thing", "round")]
    options = {
        "multi_label": True,
        "eval_fraction": 0.0,
        "scratch": {"architecture": "bert", "sizes": SIZES, "vocab_size": 200},
        "max_length": 8,
        "class_weights": {"red": 3.0},
    }
    task = text_task(table(tmp_path / "many.csv", rows), **options)
    data, model = task.train_data(), task.model()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(4)])
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    weighted = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch["labels"], pos_weight=torch.tensor([3.0, 1.0]), reduction="none"
    )
    torch.testing.assert_close(task.loss(model, batch)[0], weighted.mean(dim=1).sum())
    assert float(task.weight(batch)) == 4 + (3 - 1) * 2 / 2  # two samples have the label that weighs more


# ---- what a run leaves, and what can be done with it


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pretrained):
    """A run that fine-tuned a local model on a file that is gone."""
    folder = tmp_path_factory.mktemp("trained")
    train, held = table(folder / "train.csv", ROWS * 4), table(folder / "eval.csv")
    task = {"kind": "text", "model": str(pretrained), "max_length": 16}
    settings = runs.config(
        task=task, data={"train": train, "eval": held}, batch={"global": 8}, train={"steps": 6, "eval_every_steps": 3}
    )
    results = Trainer(settings, run_dir=folder / "run", quiet=True).fit()
    (folder / "train.csv").unlink()
    return folder / "run", results


def test_pretrained_weights_are_what_training_begins_with(trained, pretrained):
    task = text_task(str(trained[0].parent / "eval.csv"), model=str(pretrained), eval_fraction=0.0)
    torch.manual_seed(5)
    stored = load_file(pretrained / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in task.model().state_dict().items())


@pytest.mark.exhaustive
def test_pretrained_weights_are_sharded_as_they_are(pretrained, few):
    options = {"train": few["train"], "model": str(pretrained), "eval_fraction": 0.0, "max_length": 16}
    settings = runs.config(batch={"global": 4}, train={"steps": 3}, optim={"args": {"eps": text_cases.EPS}})
    (one, _), *_ = run_ranks(1, text_cases.train, options, settings)
    (two, _), *_ = run_ranks(2, text_cases.train, options, settings | {"parallel": {"strategy": "fsdp"}})
    assert text_cases.difference(one, two) < 1e-10


def test_weights_that_a_model_lacks_are_told_and_a_model_of_another_kind_is_refused(pretrained, few, tmp_path):
    from safetensors.torch import save_file
    from transformers import DistilBertConfig

    folder = tmp_path / "headless"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pretrained / name).read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {
        name: tensor
        for name, tensor in load_file(pretrained / "model.safetensors").items()
        if not name.startswith("classifier")
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    task = text_task(few["train"], model=str(folder), eval_fraction=0.0, max_length=16)
    task.model()
    assert f"not in {folder}, so initialised: classifier.bias, classifier.weight" in task.presenter(task).log_header()
    DistilBertConfig(
        vocab_size=200, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=18
    ).save_pretrained(folder)
    with pytest.raises(UsageError, match="has none of the weights of DistilBertForSequenceClassification"):
        text_task(few["train"], model=str(folder), eval_fraction=0.0, max_length=16).model()


@pytest.mark.exhaustive
def test_what_a_start_without_checkpoint_left_does_not_outlive_a_change_of_config(few, tmp_path):
    task = {"kind": "text", "scratch": few["scratch"], "max_length": 16, "eval_fraction": 0.0}
    runs.mark(tmp_path / "run")
    text_task(**few).setup(tmp_path / "run" / "task", trained=False)  # and then it was killed
    rows = [(text, label.upper()) for text, label in ROWS]
    settings = runs.config(
        task=task, data={"train": table(tmp_path / "other.csv", rows)}, batch={"global": 4}, train={"steps": 1}
    )
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    assert set(trainer.describe(["good"])[0]["probabilities"]) == {"POS", "NEG", "MIXED"}


def test_evaluation_and_prediction_need_neither_training_data_nor_pretrained_model(trained):
    folder, results = trained
    again = Trainer(config_of(folder), run_dir=folder, quiet=True)
    assert again.evaluate()["loss"] == results["eval/loss"]
    rows = again.describe(["good film", "bad film"])
    assert [row["text"] for row in rows] == ["good film", "bad film"]
    assert all(
        abs(sum(row["probabilities"].values()) - 1) < 1e-5
        and row["prediction"] == max(row["probabilities"], key=row["probabilities"].get)
        for row in rows
    )


def test_prediction_takes_files_beside_texts(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "lines.txt").write_text("good film\nvery bad\n")
    rows = Trainer(config_of(folder), run_dir=folder, quiet=True).describe(
        [str(tmp_path / "lines.txt"), "so so", table(tmp_path / "more.csv", names=("x", "text"))]
    )
    assert [row["text"] for row in rows[:3]] == ["good film", "very bad", "so so"]
    assert rows[1]["input"] == f"{tmp_path}/lines.txt:2"
    assert [row["text"] for row in rows[3:]] == [label for _, label in ROWS]


def test_prediction_of_lines_of_standard_input_goes_into_a_table(trained, tmp_path):
    from typer.testing import CliRunner

    from lockstep.cli.application import app

    done = CliRunner().invoke(
        app, ["predict", str(trained[0]), "-", "--out", str(tmp_path / "out.csv")], input="good film\n\nvery bad\n"
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["input"], row["text"]) for row in rows] == [
        ("standard input:1", "good film"),
        ("standard input:2", ""),
        ("standard input:3", "very bad"),
    ]
    for row in (rows[0], rows[2]):
        assert abs(sum(float(row[f"probabilities/{label}"]) for label in ("mixed", "neg", "pos")) - 1) < 1e-5
        assert row["prediction"]
        assert not row["reason"]
    assert [rows[1][name] for name in ("prediction", "probability", "probabilities/mixed")] == ["", "", ""]
    assert "the text is empty" in rows[1]["reason"]


@pytest.mark.parametrize("texts", [["", " \t", "good film", "\u200b"], [""]], ids=["among others", "alone"])
def test_a_text_without_tokens_gets_no_class(trained, texts):
    folder, _ = trained
    rows = Trainer(config_of(folder), run_dir=folder, quiet=True).describe(texts)
    assert [row["text"] for row in rows] == texts
    for row in rows:
        if row["text"] == "good film":
            assert row["prediction"] in ROLES
            assert "reason" not in row
        else:
            assert (row["prediction"], row["probability"], row["probabilities"]) == (None, None, dict.fromkeys(ROLES))
            assert "the text is empty" in row["reason"]
    alone = Trainer(config_of(folder), run_dir=folder, quiet=True).describe(["good film"])[0]
    for row in rows:
        if row["text"] == "good film":
            assert row["probabilities"] == pytest.approx(alone["probabilities"], abs=2e-6)


def test_exported_folder_gives_a_pipeline_the_same_probabilities(trained, tmp_path):
    from transformers import pipeline

    folder, _ = trained
    trainer = Trainer(config_of(folder), run_dir=folder, quiet=True)
    trainer.export(tmp_path / "out")
    texts = ["good film", "bad film", "a very long text that is so so"]
    classify = pipeline("text-classification", model=str(tmp_path / "out"), top_k=None, device="cpu")
    for row, scores in zip(trainer.describe(texts), classify(texts), strict=True):
        assert row["probabilities"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=2e-6)


def test_log_has_data_tables_and_samples(trained):
    folder, _ = trained
    log = (folder / "train.log").read_text()
    for part in ("by label: mixed (8), neg (8), pos (8)", "precision  recall", "truth \\ prediction", "truth 'pos'"):
        assert part in log
    tables = [json.loads(line) for line in (folder / "metric_arrays.jsonl").read_text().splitlines()]
    assert [one["step"] for one in tables] == [3, 6]
    assert sum(map(sum, tables[-1]["confusion"])) == len(ROWS)
    assert not any("confusion" in line for line in (folder / "metrics.jsonl").read_text().splitlines())


def test_macro_f1_and_accuracy_are_those_of_the_confusion_matrix(trained):
    folder, results = trained
    confusion = torch.tensor(
        json.loads((folder / "metric_arrays.jsonl").read_text().splitlines()[-1])["confusion"], dtype=torch.float64
    )
    f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1))
    assert results["eval/macro_f1"] == pytest.approx(float(f1.mean()))
    assert results["eval/accuracy"] == pytest.approx(float(confusion.trace() / confusion.sum()))


def config_of(folder):
    from lockstep.configs import config_file

    return config_file.read_run(folder)


@pytest.mark.exhaustive
def test_stopped_and_resumed_training_is_bit_identical(few, tmp_path):
    task = {"kind": "text", "scratch": few["scratch"], "max_length": 16, "eval_fraction": 0.0}
    settings = runs.config(task=task, data={"train": few["train"]}, batch={"global": 4}, train={"steps": 6})
    weights = []
    for name, stops in (("whole", [6]), ("parts", [2, 6])):
        for steps in stops:
            Trainer(settings | {"train": {"steps": steps}}, run_dir=tmp_path / name, quiet=True).fit()
        Trainer(settings, run_dir=tmp_path / name, quiet=True).export(tmp_path / f"{name}-out")
        weights.append(load_file(tmp_path / f"{name}-out" / "model.safetensors"))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# ---- a model that is new


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """A run without `task.model`, on 24 texts, of which one in four is held back."""
    folder = tmp_path_factory.mktemp("bag")
    task = {"kind": "text", "eval_fraction": 0.25}
    settings = {
        "task": task,
        "data": {"train": table(folder / "a.csv", ROWS * 4)},
        "train": {"epochs": 8, "eval_every_epochs": 8},
    }
    settings |= {"log": {"writers": ["text_log", "json_lines"]}, "device": "cpu"}
    return folder / "run", Trainer(settings, run_dir=folder / "run", quiet=True).fit()


def test_without_a_model_a_small_new_one_learns_by_default_and_the_log_says_so(bag):
    folder, results = bag
    assert results["eval/accuracy"] == 1
    log = (folder / "train.log").read_text()
    rows = hugging_face.load_config(folder / "task").vocab_size
    size = f"{(rows + 2**14) * 16 + 16 * 3 + 3:,}"
    assert f"no task.model: a new embedding_bag of {size} parameters learns from only these 18 texts" in log


def test_a_new_transformer_on_few_texts_is_told_to_learn_little(few):
    task = text_task(**few)
    task.model()
    first, second, *_ = task.presenter(task).log_header()
    assert first.startswith("no task.model: a new bert of ")
    assert "fewer than 10,000 texts are few for a new transformer" in second
    assert not any(
        "no task.model" in line
        for line in log_header.of_model("some/model", kind="bert", parameters=5, new=[], texts=100)
    )
    assert len(log_header.of_model(None, kind="bert", parameters=5, new=[], texts=10_000)) == 1
    assert len(log_header.of_model(None, kind="embedding_bag", parameters=5, new=[], texts=10)) == 1


def test_a_bag_of_embeddings_is_a_linear_function_of_the_weighted_mean_of_the_tokens_that_count(few):
    task = text_task(few["train"], eval_fraction=0.0)
    model, data = task.model(), task.train_data()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(6)])
    logits = model(**batch | {"labels": None}).logits
    for index in range(6):
        ids = torch.from_numpy(data[index].ids).long()
        ids = torch.cat([ids, *(model.ngrams[token].long() for token in ids)])
        weights = model.importance[ids] / model.importance[ids].sum()
        torch.testing.assert_close(logits[index], model.classifier(weights @ model.embeddings.weight[ids]))
    torch.testing.assert_close(
        model(input_ids=batch["input_ids"][:1]).logits,
        model(batch["input_ids"][:1], torch.ones_like(batch["input_ids"][:1])).logits,
    )
    nothing = torch.full((1, 3), task.tokenizer.pad_token_id)
    for mask in (None, torch.zeros_like(nothing)):
        assert torch.equal(model(nothing, mask).logits[0], model.classifier.bias)


def test_the_ngrams_of_a_token_are_those_of_its_marked_letters():
    assert bag_start.ngrams_of("film") == ["<fi", "fil", "ilm", "lm>", "<fil", "film", "ilm>", "<film", "film>"]
    assert bag_start.ngrams_of("##ing") == ["ing", "ng>"]
    assert bag_start.ngrams_of("aaaa").count("aaa") == 1
    assert bag_start.ngrams_of("a") == bag_start.ngrams_of("##a") == []
    assert len(bag_start.ngrams_of("abcdefghijklmn")) == 39  # all have a place
    config = EmbeddingBagConfig(vocab_size=5, ngram_buckets=7, ngrams_per_token=3, pad_token_id=0)
    found = bag_start.ngram_rows(config, ["[PAD]", "é", "film", "##ing"], [0])
    bucket = {ngram: 5 + zlib.crc32(ngram.encode()) % 7 for ngram in ("<fi", "fil", "ilm", "ing", "ng>")}
    rows = [[0, 0, 0], [0, 0, 0], [bucket["<fi"], bucket["fil"], bucket["ilm"]], [bucket["ing"], bucket["ng>"], 0]]
    assert found.tolist() == [*rows, [0, 0, 0]]


def test_a_bag_without_ngrams_as_runs_from_before_have_it_still_loads(few, tmp_path):
    task = text_task(few["train"], eval_fraction=0.0, scratch={"sizes": {"ngram_buckets": 0}})
    model = task.model()
    assert set(model.state_dict()) == {"embeddings.weight", "importance", "classifier.weight", "classifier.bias"}
    model.save_pretrained(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    for key in ("ngram_buckets", "ngrams_per_token"):
        config.pop(key, None)
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    data = task.train_data()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(6)])
    assert torch.equal(load(tmp_path / "old")(**batch).logits, model(**batch).logits)
    weights = load_file(tmp_path / "old" / "model.safetensors")
    del weights["importance"]  # as models have none that are older still: a plain mean
    save_file(weights, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path / "old").importance.eq(1).all()


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("width", mainly([50], [2, 50]))
def test_a_new_bag_begins_as_naive_bayes(tmp_path, monkeypatch, multi_label, width):
    monkeypatch.setattr("lockstep_recipes.tasks.text.bag_start._BLOCK", 4)  # as data of more than a block
    rows = [
        ("good film", "pos"),
        ("good good plot", "pos"),
        ("bad film", "neg"),
        ("so so", "mixed"),
        ("dull bad", "neg"),
    ]
    scratch = {"sizes": {"hidden_size": width}}
    task = text_task(table(tmp_path / "a.csv", rows), multi_label=multi_label, scratch=scratch, eval_fraction=0.0)
    names, tokens = task.labels, task.tokenizer.get_vocab()
    texts = [(set(task.tokenizer.tokenize(text)), label) for text, label in rows]
    features = dict(tokens)  # and the buckets of n-grams, by the number of their row
    for bucket in range(2**14):
        features[bucket] = len(tokens) + bucket
    texts = [
        (own | {zlib.crc32(ngram.encode()) % 2**14 for token in own for ngram in bag_start.ngrams_of(token)}, label)
        for own, label in texts
    ]
    torch.manual_seed(0)
    model = task.model()
    torch.manual_seed(0)
    drawn = transformers.AutoModelForSequenceClassification.from_config(task.config)

    def share(token, chosen):
        return math.log((sum(token in text for text in chosen) + 0.3) / (len(chosen) + 0.6))

    odds = torch.zeros(len(features), len(names))
    importance = torch.zeros(len(features))
    for token, number in features.items():
        having = sum(token in text for text, _ in texts)
        wanted = 0.0 if token in task.tokenizer.all_special_tokens else math.log(6 / (1 + having)) + 1
        importance[number] = wanted if token in tokens else wanted / 2
        if having:
            odds[number] = torch.tensor([share(token, [text for text, own in texts if own == name]) for name in names])
            others = torch.tensor([share(token, [text for text, own in texts if own != name]) for name in names])
            odds[number] -= others if multi_label else odds[number].mean()
    torch.testing.assert_close(model.importance, importance)
    embeddings = model.embeddings.weight - drawn.embeddings.weight
    found = embeddings @ (model.classifier.weight - drawn.classifier.weight).T
    if width > len(names):
        trust = (5 / 3) / (5 / 3 + 300)  # there are 5 texts of 3 classes
        torch.testing.assert_close(found, 3 * trust**2 * odds, rtol=1e-3, atol=1e-7)
    else:  # a space of two dimensions keeps a part of it
        assert torch.nn.functional.cosine_similarity(found.flatten(), odds.flatten(), dim=0) > 0.5
    unseen = [number for token, number in features.items() if not any(token in text for text, _ in texts)]
    assert embeddings[unseen].eq(0).all()


def test_a_new_model_is_exported_for_transformers_and_can_be_trained_on(bag, tmp_path):
    from transformers import pipeline

    folder, _ = bag
    trainer = Trainer(config_of(folder), run_dir=folder, quiet=True)
    trainer.export(tmp_path / "out")
    rows = trainer.describe(["good film", "neither", "", "so so"])
    assert [row["prediction"] for row in rows] == ["pos", "mixed", None, "mixed"]
    classify = pipeline("text-classification", model=str(tmp_path / "out"), top_k=None, device="cpu")
    for row in (rows[0], rows[1], rows[3]):
        assert row["probabilities"] == pytest.approx(
            {one["label"]: one["score"] for one in classify([row["text"]])[0]}, abs=2e-6
        )
    again = text_task(str(folder.parent / "a.csv"), model=str(tmp_path / "out"), eval_fraction=0.0)
    assert torch.equal(
        again.model().embeddings.weight, load_file(tmp_path / "out" / "model.safetensors")["embeddings.weight"]
    )


@pytest.mark.exhaustive
def test_an_exported_new_model_needs_no_lockstep(bag, tmp_path):
    folder, _ = bag
    Trainer(config_of(folder), run_dir=folder, quiet=True).export(tmp_path / "out")
    code = "import sys; from transformers import AutoModelForSequenceClassification as Auto\n"
    code += f"model = Auto.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=True)\n"
    code += "assert model.config.id2label[2] == 'pos', model.config\nassert 'lockstep' not in sys.modules"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- batches


def test_batches_are_padded_to_their_longest_text(few):
    task = text_task(**few)
    data = task.train_data()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(3)])
    wanted = task.tokenizer([data[index].text for index in range(3)], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], wanted["input_ids"])
    assert torch.equal(batch["attention_mask"], wanted["attention_mask"])
    assert list(data.lengths) == [len(data[index].ids) for index in range(6)]
    assert batch["has_padding"] == (not wanted["attention_mask"].all())


@pytest.mark.parametrize("kind", hugging_face._SEES_ALL)
def test_a_mask_that_needs_no_read_of_the_device_gives_the_bits_of_transformers_own(kind, monkeypatch):
    config = transformers.AutoConfig.for_model(kind, **small_sizes(kind))
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    assert config._attn_implementation == "sdpa"
    tokens, full = torch.randint(5, 50, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    padded = full.clone()
    padded[1, 4:] = 0
    for mask in (full, padded):
        expected = model(input_ids=tokens, attention_mask=mask).logits
        has_padding = not mask.all()
        with monkeypatch.context() as changed:
            changed.setattr(torch.Tensor, "all", None)  # nobody asks for padding
            found = model(input_ids=tokens, attention_mask=hugging_face.mask_for(model, mask, has_padding)).logits
        assert torch.equal(found, expected)
    model.config.is_decoder = True
    assert hugging_face.mask_for(model, padded, True) is padded


def small_sizes(kind):
    if kind == "distilbert":
        return {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 60}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return (
        sizes | {"vocab_size": 60, "embedding_size": 16}
        if kind in ("albert", "electra")
        else sizes | {"vocab_size": 60}
    )


def test_tokens_of_another_process_are_found_again_whatever_was_tokenised_before(few):
    one, other = text_task(**few), text_task(**few)
    before = hugging_face.digest_of_tokenizer(one.tokenizer)
    one.tokenizer(["good film"], truncation=True, padding=True, max_length=4)
    assert (
        hugging_face.digest_of_tokenizer(one.tokenizer) == before == hugging_face.digest_of_tokenizer(other.tokenizer)
    )
    one.tokenizer.add_tokens(["unheard"])
    assert hugging_face.digest_of_tokenizer(one.tokenizer) != before


def test_pairs_have_token_types(tmp_path):
    rows = [("one", "two words", "yes"), ("three little words", "four", "no")]
    task = text_task(
        table(tmp_path / "pairs.csv", rows, ("premise", "hypothesis", "label")),
        eval_fraction=0.0,
        scratch={"architecture": "bert", "sizes": SIZES, "vocab_size": 200},
    )
    data = task.train_data()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(2)])
    wanted = task.tokenizer(["one", "three little words"], ["two words", "four"], padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], wanted[name]) for name in ("input_ids", "attention_mask", "token_type_ids"))


def test_labels_keep_the_order_of_a_model_that_has_them(pretrained, tmp_path):
    config = hugging_face.load_config(pretrained)
    hugging_face.set_labels(config, ["pos", "mixed", "neg"], multi_label=False, pad_token_id=0)
    config.save_pretrained(tmp_path / "turned")
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "turned" / name).write_bytes((pretrained / name).read_bytes())
    task = text_task(table(tmp_path / "few.csv"), model=str(tmp_path / "turned"), eval_fraction=0.0, max_length=16)
    assert task.labels == ["pos", "mixed", "neg"]
    assert [task.presenter(task).truth(task.train_data()[index]) for index in range(6)] == [label for _, label in ROWS]


# ---- bad input


def test_model_of_another_number_of_labels_is_refused_unless_its_head_is_to_go(pretrained, tmp_path):
    two = table(tmp_path / "two.csv", ROWS[:4])
    with pytest.raises(UsageError, match=r"3 labels \(mixed, neg, pos\), the data has 2 \(neg, pos\)") as caught:
        text_task(two, model=str(pretrained), eval_fraction=0.0).model()
    assert "task.new_head=true" in caught.value.remedy
    model = text_task(two, model=str(pretrained), eval_fraction=0.0, new_head=True).model()
    assert model.classifier.weight.shape[0] == 2


def test_model_that_cannot_be_loaded_says_where_it_was_looked_for(few, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError,
        match=(
            r"'no-such/model' cannot be loaded; looked for as a folder .*no-such/model, in the cache .*hub, and "
            r"at https://"
        ),
    ) as caught:
        text_task(**few | {"model": "no-such/model"}).model()
    assert "HF_HUB_OFFLINE is set" in caught.value.what


def test_folder_without_a_model_is_named_with_what_it_has(few, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").write_text("hello")
    with pytest.raises(UsageError, match=r"in the folder .*empty, which has: notes.md"):
        text_task(**few | {"model": str(tmp_path / "empty")}).model()


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"scratch": {"architecture": "bertt"}}, UsageError, "did you mean bert"),
        ({"scratch": {"architecture": "bert", "sizes": {"hidden_sise": 8}}}, UsageError, "did you mean hidden_size"),
        (
            {"scratch": {"sizes": {"num_hidden_layers": 8}}},
            UsageError,
            "for a different model, set task.scratch.architecture, such as bert",
        ),
        (
            {"scratch": {"architecture": "bert", "sizes": {"hidden_size": 10, "num_attention_heads": 3}}},
            LockstepError,
            "hidden",
        ),
        ({"class_weights": {"nice": 2.0}}, UsageError, "no such label: 'nice'"),
        ({"columns": {"text": "texts"}}, DataError, "did you mean text"),
        ({"columns": {"label": "class"}}, DataError, "one of: text, label"),
    ],
    ids=["architecture", "size", "another size", "sizes", "class weights", "text column", "label column"],
)
def test_wrong_options_are_named_with_what_there_is(few, changes, kind, words):
    def begin():
        task = text_task(**few | changes)
        model, data = task.model(), task.train_data()
        batch = task.collate([task.prepare(data[0], 0, True)])
        task.weight(batch)
        task.loss(model, batch)

    with pytest.raises(kind) as caught:
        begin()
    assert words in str(caught.value)


def test_more_tokens_than_the_model_takes_are_refused(pretrained, tmp_path):
    with pytest.raises(UsageError, match="512 is more than the") as caught:
        text_task(table(tmp_path / "few.csv"), model=str(pretrained), max_length=512).train_data()
    assert caught.value.where == "task.max_length"


def test_label_that_training_lacks_is_an_error_with_file_and_line(few, tmp_path):
    held = table(tmp_path / "held.csv", [("fine", "pos"), ("what", "unheard of")])
    with pytest.raises(DataError, match="'unheard of' does not occur in the training data") as caught:
        text_task(**few | {"eval": held}).eval_data()
    assert caught.value.where == f"{held}:3"


def test_one_label_is_nothing_to_learn(few, tmp_path):
    with pytest.raises(DataError, match=r"1 label \(pos\)"):
        text_task(**few | {"train": table(tmp_path / "one.csv", [("good", "pos"), ("very good", "pos")])}).model()


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (
            [(f"text {number}", f"label {number}") for number in range(8)],
            {},
            "is 0.1 of 8 texts, and 8 of 8 labels with a single text",
        ),
        (
            [(f"text {number}", f"label {number}") for number in range(8)],
            {"multi_label": True},
            "is 0.1 of 8 texts, and 8 of 8 labels with a single text",
        ),
        ([(f"text {number}", "ab"[number % 2]) for number in range(4)], {}, "is 0.1 of 4 texts"),
    ],
    ids=["all once", "all once, several labels", "few"],
)
def test_a_share_for_evaluation_that_is_empty_is_said_and_training_without_evaluation_goes_on(
    few, tmp_path, rows, options, words
):
    train = table(tmp_path / "a.csv", rows)
    task = {"kind": "text", "scratch": few["scratch"], "max_length": 16, **options}
    settings = runs.config(task=task, data={"train": train}, batch={"global": 4}, train={"steps": 1})
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    assert words in (tmp_path / "run" / "train.log").read_text()
    with pytest.raises(DataError, match="no texts are held back for evaluation") as caught:
        Trainer(settings | {"train": {"steps": 1, "eval_every_steps": 1}}, run_dir=tmp_path / "other", quiet=True).fit()
    assert words in caught.value.what
    assert caught.value.where == train
    assert "data.eval" in caught.value.remedy


def test_labels_that_no_evaluation_text_has_are_named(few, tmp_path):
    rows = [*((f"text {number}", "often") for number in range(20)), ("what", "once"), ("is this", "seldom")]
    task = text_task(**few | {"train": table(tmp_path / "a.csv", rows), "eval_fraction": 0.1})
    lines = task.presenter(task).log_header()
    assert "  not evaluated, because no evaluation text has them: 2 of 3 labels (once, seldom)" in lines


def test_quotes_that_were_read_as_letters_are_told_once(few, tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + '"good film"\tpos\n"bad film"\tneg\n' * 10)
    task = text_task(**few | {"train": str(tmp_path / "a.tsv"), "eval_fraction": 0.1})
    lines = task.presenter(task).log_header()
    assert ["20 fields in" in line for line in lines].count(True) == 1
    task = text_task(**few | {"train": str(tmp_path / "a.tsv"), "quoting": "minimal"})
    assert task.train_data()[0].text == "good film"
    assert not any("fields in" in line for line in task.presenter(task).log_header())


def test_unwritable_run_directory_is_an_error(few, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        text_task(**few).setup(tmp_path / "file" / "task", trained=False)


def test_text_is_a_task():
    assert issubclass(Text, Task)


def test_a_long_text_is_no_file(few):
    task = text_task(**few)
    text = "good " * 2000
    assert [row.text for row in task.presenter(task).inputs([text]).rows] == [text]


# ---- what the tokenizer does not know


GREEK = "\u03ba\u03b1\u03bb\u03bf \u03b5\u03c1\u03b3\u03bf"


def test_texts_of_another_script_are_an_error(few, tmp_path):
    task = text_task(**few | {"eval": table(tmp_path / "e.csv", [(GREEK, "pos"), (GREEK, "neg"), ("good", "pos")])})
    with pytest.raises(DataError, match="the tokenizer does not know 80% of the tokens") as caught:
        task.eval_data()
    assert caught.value.where == str(tmp_path / "e.csv")
    assert "task.model" in caught.value.remedy


def test_the_share_of_unknown_tokens_is_reported(few, tmp_path):
    rows = [*ROWS[:4], (f"good {GREEK}", "pos")]
    task = text_task(**few | {"eval": table(tmp_path / "e.csv", rows)})
    (line,) = (line for line in task.presenter(task).log_header() if "does not know" in line)
    assert line == ("  WARNING: the tokenizer does not know 2 of 11 tokens (18.2%); they are all the same to the model")
