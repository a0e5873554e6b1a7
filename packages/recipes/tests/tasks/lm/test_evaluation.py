"""Results of evaluations against plain sums, written texts against transformers, predictions and exports."""

import io
import json
import math
import os
import pty
import re
import select
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli import predict
from lockstep.cli.application import app
from lockstep.cli.export import next_step
from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.lm import attention, models, writing
from tests import hub_server, lm_cases, runs
from tests.lm_cases import json_lines, lm_task, small_task
from tests.ranks import run_ranks
from tests.selection import mainly

TINY = {"kind": "lm", **lm_cases.SMALL, "length": 32, "vocab_size": 300, "new_tokens": 8}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    """A short training with an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "lm"
    settings = runs.config(
        task=TINY | {"prompts": ["the cat", "a"]},
        data={"train": corpus},
        batch={"global": 8},
        train={"steps": 6, "eval_every_steps": 6},
        name="plays",
    )
    Trainer(settings, run_dir=folder, quiet=True).fit()
    return folder


# ---- results


@pytest.mark.parametrize("kind", mainly(["gpt2"], lm_cases.MODELS))
def test_results_are_those_of_sums_over_all_tokens_on_any_number_of_ranks(corpus, kind):
    options = {"train": corpus, **lm_cases.MODELS[kind], "eval_fraction": 0.3, "new_tokens": 4}
    settings = runs.config(batch={"global": 4, "micro": 2}, train={"steps": 1, "eval_every_steps": 1})
    trained = {world: run_ranks(world, lm_cases.train, options, settings)[0] for world in (1, 2, 3)}
    task = small_task(**options)
    data = task.eval_data()
    model = task.model().double().eval()
    model.load_state_dict(trained[1][0])
    nats = tokens = right = 0
    with torch.no_grad():
        for index in range(len(data)):
            for ids, targets in lm_cases.pieces(data[index]):
                logits = model(input_ids=ids[None]).logits[0]
                nats += functional.cross_entropy(logits, targets, reduction="sum").item()
                tokens += len(targets)
                right += int((logits.argmax(dim=1) == targets).sum())
    texts = [json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()]
    held = {place.rpartition(":")[2] for place in data.tokens.places}
    size = sum(len(text) for number, text in enumerate(texts, start=1) if str(number) in held)
    bound = 1e-8 if kind == "llama" else 1e-10  # the RMSNorm of transformers' Llama computes in float32
    for _, results in trained.values():
        assert results["eval/loss"] == pytest.approx(nats / tokens, rel=bound)
        assert results["eval/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=bound)
        assert results["eval/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=bound)
        assert results["eval/accuracy"] == pytest.approx(right / tokens, rel=bound)


def test_bits_per_byte_do_not_depend_on_the_tokenizer_for_a_model_that_knows_nothing(tmp_path):
    """A model that thinks all tokens alike needs log2(vocabulary) bits for each token, whatever the tokens are."""
    name = json_lines(tmp_path / "a.jsonl", [{"text": "abcabcab"}] * 12)
    task = small_task(name, tokenizer="characters")
    model, data = task.model().double().eval(), task.train_data()
    torch.nn.init.zeros_(model.model.norm.weight)
    output = task.predict(model, task.collate([data[index] for index in range(len(data))]))
    metrics = task.metrics().metrics["tokens"]
    metrics.update(output)
    # Eight letters and the end of the text: nine tokens for eight bytes.
    assert float(metrics.compute()["bits_per_byte"]) == pytest.approx(math.log2(len(task.tokenizer)) * 9 / 8)


# ---- texts


def left_padded(task, prompts, new_tokens=8):
    return writing.prepare_prompts([task.prompt(text).ids for text in prompts], new_tokens=new_tokens, padding=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_most_probable_text_is_that_of_transformers(corpus, kind):
    known = lm_cases.MODELS | {"mistral": {"config": {**lm_cases.LLAMA, "model_type": "mistral", "sliding_window": 4}}}
    task = small_task(corpus, **known[kind])
    torch.manual_seed(3)
    model = task.model().double().eval()
    for parameter in model.parameters():  # new models write one token again and again
        torch.nn.init.normal_(parameter, std=0.5)
    prompts = ["the cat", "a", "the old river over the house"]
    batch = left_padded(task, prompts)
    end = task.tokenizer.eos_token_id
    found = writing.write(model, *batch.values(), temperature=0, top_k=None, end=end)
    for text, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([task.prompt(text).ids])
        theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=end)[0]
        theirs = [token for token in theirs[ids.shape[1] :].tolist() if token != end]
        assert tokens[tokens >= 0].tolist() == theirs


def test_a_text_does_not_depend_on_the_other_prompts_of_its_batch(corpus):
    task = small_task(corpus)
    model = task.model().double().eval()
    prompts = ["the cat", "a", "the old river over the house"]

    def write(several):
        batch = left_padded(task, several)
        return writing.write(model, *batch.values(), temperature=1.0, top_k=20, end=None).tolist()

    together = write(prompts)
    assert together == [write([prompt])[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in together}) == 3


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, 4)
    draws = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    shares = writing._drawn(logits, draws, 1.0, None).bincount(minlength=4) / 20000
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)
    shares = writing._drawn(logits, draws, 1.0, 2).bincount(minlength=4) / 20000
    assert shares.tolist() == pytest.approx([5 / 8, 3 / 8, 0, 0], abs=0.01)
    shares = writing._drawn(logits, draws, 0.5, None).bincount(minlength=4) / 20000
    squares = [0.25, 0.09, 0.0225, 0.0025]
    assert shares.tolist() == pytest.approx([square / sum(squares) for square in squares], abs=0.01)


def test_prompts_and_new_tokens_share_the_positions_of_the_model(corpus):
    assert writing.room_for(None, 10) == (None, 10)
    assert writing.room_for(32, 10) == (22, 10)
    assert writing.room_for(32, 100) == (16, 16)
    task = small_task(corpus, new_tokens=100)
    batch = task.collate([task.presenter(task).inputs(["the cat " * 40])[0]])
    assert batch["prompt_ids"].shape == (1, 16)
    assert task.predict(task.model(), batch)["written"].shape == (1, 1, 16)
    assert not task.presenter(task).inputs(["the cat"]).notes
    (note,) = task.presenter(task).inputs(["the cat", "the cat " * 40]).notes
    assert note == "argument 2: the prompt is too long: the model sees only its last 16 tokens"


def stand_in(tokenizer, tokens):
    """A model that writes these tokens, each for a second prompt, too, and then the end."""
    end = tokenizer.eos_token_id

    class Written(torch.nn.Module):
        def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=0, use_cache=False):
            seen = past_key_values or 0
            logits = torch.zeros(*input_ids.shape, len(tokenizer))
            logits[..., [*tokens, end][min(seen, len(tokens))]] = 100.0
            return SimpleNamespace(logits=logits, past_key_values=seen + 1)

    return Written()


ODD = "a\N{GRINNING FACE} na\u00efve\n  \u6f22\u5b57,  and\n\n (more) \x1b[31m."


def llamas_tokenizer():
    """A tokenizer as Llama has: spaces begin words, letters that it does not know are bytes."""
    known = ["<end>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"adehimnort", "an", "\u2581an"]
    merges, vocabulary = [("a", "n"), ("\u2581", "an")], {token: number for number, token in enumerate(known)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.mark.parametrize("kind", ["bpe", "characters", "llama"])
def test_a_text_on_a_terminal_appears_letter_by_letter_and_is_the_text(tmp_path, monkeypatch, kind):
    options = {"tokenizer": "characters" if kind == "characters" else "bpe", "temperature": 0.0, "length": 256}
    task = small_task(json_lines(tmp_path / "a.jsonl", [{"text": ODD}] * 12), **options)
    if kind == "llama":
        task.__dict__["tokenizer"] = llamas_tokenizer()
    model = stand_in(task.tokenizer, task.tokenizer(ODD, add_special_tokens=False)["input_ids"])
    controller, terminal = pty.openpty()
    termios.tcsetattr(terminal, termios.TCSANOW, [0, 0, termios.CS8, 0, 0, 0, [b"\0"] * 32])  # as it is written
    shown, draw = [], writing._drawn

    def drawn(*arguments, **options):
        shown.append(read_now(controller))
        return draw(*arguments, **options)

    monkeypatch.setattr(writing, "_drawn", drawn)
    presenter = task.presenter(task)
    with open(terminal, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert presenter.stream(["the"])
        data = presenter.inputs(["the"])
        output = task.predict(model, task.collate([data[0]]))
        shown.append(read_now(controller))
    os.close(controller)
    text = presenter.describe({name: values[0] for name, values in output.items()})["text"]
    assert text == task.decoded(torch.tensor(task.tokenizer(ODD, add_special_tokens=False)["input_ids"]))
    assert "\N{GRINNING FACE}" in text
    assert "".join(shown) == text.replace("\x1b", "\N{REPLACEMENT CHARACTER}") + "\n"
    assert len(list(filter(None, shown))) > 10
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown).replace("\N{REPLACEMENT CHARACTER}[31m", "")


def read_now(controller):
    """What has come to a terminal since the last time."""
    found = b""
    while select.select([controller], [], [], 0)[0]:
        found += os.read(controller, 65536)
    return found.decode()


def test_only_a_single_prompt_of_the_command_line_is_shown_while_it_is_written(corpus, tmp_path):
    presenter = (task := small_task(corpus)).presenter(task)
    (tmp_path / "prompts.txt").write_text("the dog\n")
    assert presenter.stream(["the cat"])
    assert task.stream is not None
    for several in (["the cat", "a"], ["-"], [str(tmp_path / "prompts.txt")], ["lacking.csv"], []):
        assert not presenter.stream(several)
        assert task.stream is None


@pytest.mark.parametrize("terminal", [True, False])
def test_the_command_writes_a_text_to_a_terminal_and_json_elsewhere(run_dir, monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    trainer = Trainer(settings_of(run_dir), run_dir=run_dir, quiet=True)
    (expected,) = described(trainer, ["the cat"])
    predict._predict(trainer, ["the cat"], 8, None, None)
    written = capsys.readouterr().out
    assert written == expected["text"] + "\n" if terminal else json.loads(written) == expected
    predict._predict(trainer, ["the cat", "a"], 8, None, None)
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["the cat", "a"]


def described(trainer, inputs):
    found = []
    trainer.predict_rows(lambda rows, readable: found.extend(rows), inputs, 8, by_row=False)
    return found


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_that_take_no_positions_write_each_text_alone(corpus, kind):
    sizes = {"hidden_size": 16, "bos_token_id": 0}
    sizes |= {"n_layer": 1, "n_head": 2} if kind == "bloom" else {"num_hidden_layers": 1}
    task = small_task(corpus, config={"model_type": kind, **sizes}, packing=False, new_tokens=6)
    model = task.model().eval()
    data = task.presenter(task).inputs(["the cat", "a"])
    both = task.predict(model, task.collate([data[0], data[1]]))["written"]
    assert both[1].tolist() == task.predict(model, task.collate([data[1]]))["written"][0].tolist()


# ---- the log and the presenter


def test_the_log_has_results_prompts_and_padding(run_dir):
    log = (run_dir / "train.log").read_text()
    assert re.search(r"perplexity [\d.]+, [\d.]+ bits per byte of text, next token correct in [\d.]+%", log)
    assert "'the cat' -> '" in log
    assert "'a' -> '" in log
    assert re.search(r"rows of 32 tokens, several documents in a row: \d\.\d\d% of the tokens are padding", log)
    assert re.search(r"split over rows: \d documents? longer than task.length", log)
    assert "Lockstep's small model (as Llama)" in log


def test_texts_of_evaluations_do_not_depend_on_ranks(corpus):
    options = {"train": corpus, "eval_fraction": 0.3, "prompts": ["the cat"], "new_tokens": 6}
    task = small_task(**options)
    torch.manual_seed(0)
    model = task.model().double().eval()
    data = task.eval_data()
    output = task.predict(model, task.collate([data[0], data[1]]))
    shown = task.presenter(task).report({}, [(data[0], {"written": output["written"][0]})])
    assert shown.startswith("  'the cat' -> '")
    assert output["written"][1].tolist() == [[writing.NO_PROMPT] * 6]


def test_without_prompts_the_beginnings_of_documents_are_continued(corpus, tmp_path):
    task = small_task(corpus, eval_fraction=0.3)
    data = task.eval_data()
    assert len(data[0].prompts) == 3
    assert not data[1].prompts
    assert data[0].prompts[0].ids == tuple(data.tokens.ids[: 1 + 16].tolist())
    rows = [{"question": f"{number} and 1?", "answer": str(number + 1)} for number in range(20)]
    task = small_task(json_lines(tmp_path / "qa.jsonl", rows), eval_fraction=0.3)
    assert all(prompt.text.endswith("and 1?\n") for prompt in task.eval_data()[0].prompts)
    asking = small_task(str(tmp_path / "qa.jsonl"), eval_fraction=0.3, exact_match=2).eval_data()
    prompts = [prompt for index in range(len(asking)) for prompt in asking[index].prompts]
    assert [prompt.answer is not None for prompt in prompts].count(True) == 2  # questions are asked once
    assert len({prompt.ids for prompt in prompts}) == len(prompts) == 3
    assert task.prompt("3 and 1?").ids[-1] == task.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    assert not task.prepare(task.eval_data()[0], 0, True).prompts
    assert not small_task(corpus, eval_fraction=0.3, prompts=[]).eval_data()[0].prompts


def test_predictions_are_texts_and_rows(run_dir, tmp_path, capsys):
    trainer = Trainer(json.loads(json.dumps(settings_of(run_dir))), run_dir=run_dir, quiet=True)
    found = []
    (tmp_path / "prompts.txt").write_text("the dog\nto go\n")
    (tmp_path / "prompts.csv").write_text("prompt\nthe dog\n")
    inputs = ["the cat", str(tmp_path / "prompts.txt"), str(tmp_path / "prompts.csv")]
    trainer.predict_rows(lambda rows, readable: found.extend(rows), inputs, 8)
    assert [row["prompt"] for row in found] == ["the cat", "the dog", "to go", "the dog"]
    assert found[1]["input"] == f"{tmp_path / 'prompts.txt'}:1"
    assert found[1]["text"] == found[3]["text"] != ""
    rows = []
    trainer.predict_rows(lambda of_sample, readable: rows.extend(of_sample), [], 2)
    assert rows[0]["tokens"] > 0
    assert rows[0]["prompts"] == ["the cat", "a"]
    assert rows[0]["texts"][0] == found[0]["text"]
    assert "texts" not in rows[1]
    with pytest.raises(UsageError, match="argument 1: an empty prompt"):
        trainer.predict_rows(lambda rows, readable: None, [""], 8)


def test_prompts_of_a_folder_are_those_of_its_files_and_blank_lines_are_left_out(corpus, tmp_path, monkeypatch):
    task = small_task(corpus)
    presenter = task.presenter(task)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("the dog\n\n  \nto go\n")
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "the cat"}\n')
    (tmp_path / "in" / "c.png").write_bytes(b"\x89")
    found = presenter.inputs([str(tmp_path / "in"), "\n"])
    assert [prompt.text for prompt in found.prompts] == ["the cat", "the dog", "to go", "\n"]
    assert found.notes == [f"2 blank lines left out, the first is {tmp_path / 'in' / 'b.txt'}:2"]
    assert not presenter.stream([str(tmp_path / "in")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no file in this folder can be used"):
        presenter.inputs([str(tmp_path / "empty")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(UsageError, match="INPUT -: no prompt"):
        presenter.inputs(["-"])


def settings_of(run_dir):
    import yaml

    return yaml.safe_load((run_dir / "config.yaml").read_text())


# ---- a run that goes on


def test_a_run_does_not_go_on_with_other_texts(tmp_path):
    """The number of rows stays, and so do the rows that a fingerprint looks at."""
    rows = [{"text": text} for text in lm_cases.texts(40)]
    task = TINY | {"packing": False, "eval_fraction": 0.0}
    name = json_lines(tmp_path / "a.jsonl", rows)
    settings = runs.config(task=task, data={"train": name}, batch={"global": 4}, train={"steps": 2})
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    rows[7]["text"] = rows[7]["text"].replace("e", "o", 1)
    json_lines(tmp_path / "a.jsonl", rows)
    longer = settings | {"train": {"steps": 3}}
    says = r"began with: training tokens: [\d,]+ \(digest \w+\) then, [\d,]+ \(digest \w+\) now"
    with pytest.raises(UsageError, match=says + r'\n.*allow_change=\["data"\].*fresh=True'):
        Trainer(longer, run_dir=tmp_path / "run", quiet=True).fit()
    assert Trainer(longer, run_dir=tmp_path / "run", allow_change=["data"], quiet=True).fit()["step"] == 3


# ---- exports


def test_transformers_loads_an_export_without_lockstep(run_dir, tmp_path):
    trainer = Trainer(settings_of(run_dir), run_dir=run_dir, quiet=True)
    trainer.export(tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    own = load(trainer)
    assert torch.allclose(own(ids).logits, model(ids).logits, atol=1e-5)
    assert model.generation_config.max_new_tokens == 8
    assert tokenizer.bos_token_id == ids[0, 0]  # as in the training, a document begins with its token
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "the cat"


def test_the_line_that_uses_an_export_gives_the_text_of_predict(tmp_path, capsys):
    rows = [{"question": f"{number} and 1?", "answer": str(number + 1)} for number in range(20)]
    task = TINY | {"after_prompt": "\n=", "temperature": 0.0}
    data = {"train": json_lines(tmp_path / "qa.jsonl", rows)}
    trainer = Trainer(
        runs.config(task=task, data=data, batch={"global": 4}, train={"steps": 3}), run_dir=tmp_path / "run", quiet=True
    )
    trainer.fit()
    trainer.export(tmp_path / "out")
    capsys.readouterr()
    exec(next_step(tmp_path / "out"), {})
    (expected,) = described(trainer, ["A question"])
    assert capsys.readouterr().out == f"A question\n={expected['text']}\n"


def test_an_export_is_uploaded(run_dir, tmp_path, monkeypatch):
    with hub_server.running() as hub:
        hub_server.use(hub, monkeypatch)
        out = tmp_path / "out"
        call = ["export", str(run_dir), str(out), "--push-to-hub", "someone/plays"]
        refused = CliRunner().invoke(app, [*call[:-1], "plays"])
        assert refused.exit_code == 2
        assert "--push-to-hub plays: the name has no owner" in refused.stderr
        assert not out.exists()
        done = CliRunner().invoke(app, call)
        assert done.exit_code == 0, done.output
        assert f"{hub.address}/someone/plays" in done.stdout
        assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
        assert "README.md" in hub.files


def load(trainer):
    trainer.evaluate()
    return trainer.model


def test_the_model_card_is_written_from_the_run(run_dir, corpus, tmp_path):
    Trainer(settings_of(run_dir), run_dir=run_dir, quiet=True).export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "# plays" in card
    assert "6 steps of 8 rows" in card
    entry = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| `eval/perplexity` | {entry['eval/perplexity']:.5g} |" in card
    assert f"`lockstep train lm data.train={corpus} " in card
    assert "task.length=32" in card


def test_the_model_card_has_the_results_of_the_exported_step_only(corpus, tmp_path):
    settings = runs.config(
        task=TINY,
        data={"train": corpus},
        batch={"global": 8},
        train={"steps": 6, "eval_every_steps": 4},
        checkpoint={"every_steps": 2, "keep_last": 5},
        log={"every_steps": 2},
    )
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: f"| `eval/loss` | {entry['eval/loss']:.5g} |" for entry in entries if "eval/loss" in entry}
    assert sorted(losses) == [4, 6]
    for step in (2, 4, 6):
        trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True, checkpoint=str(step))
        trainer.export(tmp_path / f"out-{step}", program=False)
        card = (tmp_path / f"out-{step}" / "README.md").read_text()
        assert f"- {step} steps of 8 rows" in card, card
        assert [line for line in losses.values() if line in card] == ([losses[step]] if step in losses else []), card
        assert (f"These weights (step {step}) were not evaluated." in card) == (step == 2), card


def test_the_small_model_is_llama(corpus):
    """Logits and gradients of the own model and of transformers' Llama with the same weights."""
    task = lm_task(corpus, small={"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "tie": False}, vocab_size=300)
    torch.manual_seed(0)
    own = task.model()
    theirs = LlamaForCausalLM(task.config)
    theirs.load_state_dict(own.state_dict())
    batch = task.collate([task.train_data()[0], task.train_data()[1]])
    mask = attention.document_mask(batch["documents"])
    logits = [models.called(model, batch["input_ids"], batch["positions"], mask).logits for model in (own, theirs)]
    assert torch.allclose(*logits, atol=1e-5)
    for of_model in logits:
        of_model.square().sum().backward()
    for (name, parameter), other in zip(own.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-3, atol=1e-4), name


def test_an_exported_model_is_fine_tuned(run_dir, corpus, tmp_path):
    trainer = Trainer(settings_of(run_dir), run_dir=run_dir, quiet=True)
    trainer.export(tmp_path / "out")
    before = trainer.evaluate()
    task = {"kind": "lm", "model": str(tmp_path / "out"), "length": 32, "new_tokens": 4}
    settings = runs.config(
        task=task, data={"train": corpus}, batch={"global": 8}, train={"steps": 4}, optim={"lr": 1e-3}
    )
    tuned = Trainer(settings | {"train": {"steps": 4, "eval_every_steps": 4}}, run_dir=tmp_path / "tuned", quiet=True)
    assert tuned.fit()["eval/loss"] < before["loss"]
    tuned.export(tmp_path / "tuned-out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned-out").config.model_type == "llama"
