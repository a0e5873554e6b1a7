"""Documents of text files and tables, the tokens that are learned, and what is said of bad input."""

import json

import pytest

from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.look.finding import ALL
from lockstep_recipes.tasks.lm import documents, tokens
from lockstep_recipes.tasks.lm.documents import Corpus, TextSegment
from lockstep_recipes.tasks.lm.faults import view_of_documents
from lockstep_recipes.tasks.lm.options import LmOptions
from tests.lm_cases import json_lines, small_task, texts

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def read(name, render=None, **options):
    return Corpus(str(name), LmOptions.model_validate(options)).read(render)


def parts(found):
    return [[part[:2] for part in document.parts] for document in found]


def render(messages, add_generation_prompt):
    written = "".join(f"<{message['role']}>{message['content']}<end>" for message in messages)
    return written + ("<assistant>" if add_generation_prompt else "")


# ---- text files


def test_a_text_file_is_a_document_and_a_separator_makes_several(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n--\n\n--\nthree")
    assert parts(read(path)) == [[("one\ntwo\n--\n\n--\nthree", True)]]
    found = read(path, separator="--\n")
    assert parts(found) == [[("one\ntwo\n", True)], [("three", True)]]
    assert found[1].where == f"{path}, document 2"
    path.write_bytes(b"one\r\ntwo\r\n")  # of Windows
    assert parts(read(path, separator="\n")) == [[("one", True)], [("two", True)]]


def test_a_folder_has_a_document_for_each_text_file(tmp_path):
    (tmp_path / "inner").mkdir()
    for name, text in {"b.txt": "b", "a.md": "a", "inner/c.rst": "c", "d.py": "d", "e.txt": "  \n"}.items():
        (tmp_path / name).write_text(text)
    assert [document.parts[0].text for document in read(tmp_path)] == ["a", "b", "c"]
    assert [document.parts[0].text for document in read(tmp_path, suffixes=[".py"])] == ["d"]
    assert [document.parts[0].text for document in read(tmp_path / "*.md")] == ["a"]


def test_a_file_in_utf_16_without_its_mark_is_read_and_named(tmp_path):
    (tmp_path / "a.txt").write_text("a text in UTF-8")
    (tmp_path / "b.txt").write_bytes("a text in UTF-16".encode("utf-16-le"))
    (tmp_path / "c.txt").write_bytes("a text with its mark".encode("utf-16"))
    corpus = Corpus(str(tmp_path), LmOptions())
    view = view_of_documents({"training": lambda: corpus.read(None)}, ALL, [corpus])
    assert view.training.texts[1] == "a text in UTF-16"
    assert [(one.code, one.file) for one in view.refused] == [("wrong-encoding", str(tmp_path / "b.txt"))]


def test_input_without_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"empty.txt: no text"):
        read(tmp_path / "empty.txt")
    (tmp_path / "inner").mkdir()
    with pytest.raises(UsageError, match="no file in this folder can be used"):
        read(tmp_path / "inner")
    with pytest.raises(DataError, match=r"no such file[\s\S]*empty.txt"):
        read(tmp_path / "emty.txt")


# ---- tables


def test_columns_are_found_by_their_usual_names(tmp_path):
    rows = [{"question": "2+2?", "answer": "4", "number": 1}]
    assert parts(read(json_lines(tmp_path / "a.jsonl", rows))) == [[("2+2?\n", False), ("4", True)]]
    rows = [{"instruction": "Add", "input": "2 2", "output": "4"}]
    found = read(json_lines(tmp_path / "b.jsonl", rows), after_prompt=" =")
    assert parts(found) == [[("Add\n2 2 =", False), ("4", True)]]
    (tmp_path / "c.csv").write_text("id,text\n1,one\n2,two\n")
    assert parts(read(tmp_path / "c.csv")) == [[("one", True)], [("two", True)]]
    (tmp_path / "d.csv").write_text("story\none\n")
    assert parts(read(tmp_path / "d.csv")) == [[("one", True)]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("question,answer\nq1,a1\nq2,\n", r"a.csv:3: the row has no answer \(column 'answer'\)"),
        ("question,answer\nq1,a1\n,a2\n", r"a.csv:3: the row has no prompt \(column 'question'\)"),
    ],
)
def test_a_prompt_without_an_answer_and_an_answer_without_a_prompt_are_refused(tmp_path, text, says):
    """An empty answer would teach the model to end at once."""
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        Corpus(str(tmp_path / "a.csv"), LmOptions()).read(None)


def test_columns_are_named(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"x": "1", "y": "2", "z": "3"}])
    found = read(name, columns={"prompt": ["x", "y"], "answer": "z"}, loss_on="all")
    assert parts(found) == [[("1\n2\n", True), ("3", True)]]
    with pytest.raises(DataError, match=r"there is no column 'w'[\s\S]*task.columns.text to one of: x, y, z"):
        read(name, columns={"text": "w"})
    with pytest.raises(DataError, match="no column has a usual name for the text"):
        read(name)
    with pytest.raises(DataError, match=r"task.columns: columns for prompt\n.*prompt and answer"):
        read(name, columns={"prompt": "x"})
    numbers = json_lines(tmp_path / "b.jsonl", [{"text": "a"}, {"text": 5}])
    with pytest.raises(DataError, match=r"b.jsonl:2: column 'text' contains 5 \(int\), not text"):
        read(numbers)


# ---- chats

CHAT = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
LEARNED = [
    ("<system>Be kind<end><user>hi<end><assistant>", False),
    ("hello<end>", True),
    ("<user>bye<end><assistant>", False),
    ("see you<end>", True),
]


def test_of_a_chat_the_answers_are_learned_with_their_end(tmp_path):
    name = json_lines(
        tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": json.dumps(CHAT)}, {"messages": repr(CHAT)}]
    )
    assert parts(read(name, render)) == [LEARNED, LEARNED, LEARNED]
    whole = "".join(text for text, _ in LEARNED)
    assert parts(read(name, render, loss_on="all"))[0] == [(whole, True)]
    with pytest.raises(DataError, match=r"task.tokenizer: the tokenizer has no chat template"):
        read(name)


def broken(messages, add_generation_prompt):
    """As `render`, with a line break behind each end, as most templates write."""
    return render(messages, add_generation_prompt).replace("<end>", "<end>\n")


def test_what_a_template_writes_behind_an_end_token_is_not_learned(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (found,) = read(name, broken)
    assert [part.text for part in found.parts if part.counts] == ["hello<end>", "see you<end>"]
    assert "".join(part.text for part in found.parts) == broken(CHAT, False)

    def without_end(messages, add_generation_prompt):
        return render(messages, add_generation_prompt).replace("<end>", "\n")

    (found,) = read(name, without_end)  # here the line break itself is the end
    assert [part.text for part in found.parts if part.counts] == ["hello\n", "see you\n"]


def test_a_chat_may_begin_with_an_answer(tmp_path):
    def careful(messages, add_generation_prompt):
        assert messages, "as transformers, which refuses an empty chat"
        return broken(messages, add_generation_prompt)

    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT[2:]}])
    learned = [("<assistant>", False), ("hello<end>", True)]
    learned += [("\n<user>bye<end>\n<assistant>", False), ("see you<end>", True), ("\n", False)]
    assert parts(read(name, careful)) == [learned]
    with pytest.raises(DataError, match=r"a.jsonl:1: the chat starts with an answer[\s\S]*remove this answer"):
        read(name, lambda messages, add_generation_prompt: careful(messages, False))


def test_contents_of_several_parts_are_joined_and_calls_of_tools_are_refused(tmp_path):
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": pieces}, {"role": "assistant", "content": "c"}]
    expected = [("<user>a\nb<end><assistant>", False), ("c<end>", True)]
    assert parts(read(json_lines(tmp_path / "a.jsonl", [{"messages": chat}]), render)) == [expected]
    chat[0]["content"] = [*pieces, {"type": "image_url", "image_url": "a.png"}]
    with pytest.raises(DataError, match=r"b.jsonl:1: .* is not a message"):
        read(json_lines(tmp_path / "b.jsonl", [{"messages": chat}]), render)
    chat[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    with pytest.raises(DataError, match=r"c.jsonl:1: a message has tool_calls"):
        read(json_lines(tmp_path / "c.jsonl", [{"messages": chat[1:]}]), render)


def test_an_answer_that_is_written_otherwise_where_messages_follow_is_found(tmp_path):
    """As the template of Qwen3: the last answer has a thought, which may be empty."""

    def thinking(messages, add_generation_prompt):
        texts = [f"<{message['role']}>\n{message['content']}<end>\n" for message in messages]
        if messages[-1]["role"] == "assistant":
            texts[-1] = f"<assistant>\n<think></think>{messages[-1]['content']}<end>\n"
        return "".join(texts) + "<assistant>\n" * add_generation_prompt

    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (found,) = parts(read(name, thinking))
    assert [text for text, counts in found if counts] == ["hello<end>", "<think></think>see you<end>"]
    assert "".join(text for text, _ in found) == thinking(CHAT, False)
    said_before = [*CHAT[:-2], CHAT[-2] | {"content": "hello, see you"}, CHAT[-1], {"role": "user", "content": "?"}]
    name = json_lines(tmp_path / "c.jsonl", [{"messages": [*said_before, {"role": "assistant", "content": "!"}]}])
    (found,) = parts(read(name, thinking))
    assert [text for text, counts in found if counts] == ["hello<end>", "see you<end>", "<think></think>!<end>"]
    changed = [*CHAT[:2], CHAT[2] | {"content": "<think>a</think>hello"}, *CHAT[3:]]

    def forgetting_thoughts(messages, add_generation_prompt):
        kept = [m | {"content": m["content"].replace("<think>a</think>", "")} for m in messages[:-1]]
        return thinking([*kept, messages[-1]], add_generation_prompt)

    name = json_lines(tmp_path / "b.jsonl", [{"messages": changed}])
    with pytest.raises(DataError, match=r"b.jsonl:1: the chat template writes message 2 differently"):
        read(name, forgetting_thoughts)


def test_where_a_message_was_said_is_not_a_later_message():
    text = "<user>a<end><assistant>this is a test<end><user>b<end>"
    messages = [{"content": "a "}, {"content": "this is a test"}, {"content": "b"}]
    assert [text[begin:end] for begin, end in documents._said(text, messages)] == ["a", "this is a test", "b"]
    text, messages = " a b", [{"content": " a"}, {"content": "b "}]
    assert [text[begin:end] for begin, end in documents._said(text, messages)] == [" a", "b"]


def test_a_chat_has_the_tokens_of_its_whole_text_where_a_tokenizer_puts_a_space_before_each_text():
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"<>/abcdefghijklmnopqrstuvwxyz\n\u2581"})
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Replace("\u2581", " ")
    made.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    (chat,) = [documents.Document(documents._chat(CHAT, render, False, "a"), "a", is_chat=True)]
    assert tokens._writes_before(tokenizer)
    ((ids, sizes, learned),) = tokens._encoded(tokens._joined(chat), tokenizer)
    assert ids.tolist() == tokenizer(render(CHAT, False), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[learned]) == "hello<end>see you<end>"
    assert sizes[learned].sum() == sizes.sum() == len("hello" + "see you")


def test_chats_of_other_names_and_prompts_with_answers(tmp_path):
    rows = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}]
    expected = [("<user>hi<end><assistant>", False), ("hello<end>", True)]
    assert parts(read(json_lines(tmp_path / "a.jsonl", rows), render)) == [expected]
    rows = [{"prompt": "hi", "answer": "hello"}]
    assert parts(read(json_lines(tmp_path / "b.jsonl", rows), render, chat=True)) == [expected]


def test_chats_that_cannot_be_written_are_named(tmp_path):
    def refusing(messages, add_generation_prompt):
        raise ValueError("roles must alternate")

    def forgetting(messages, add_generation_prompt):
        return render(messages[-2:], add_generation_prompt)

    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(DataError, match=r"a.jsonl:1: the chat template cannot write this chat: ValueError: roles must"):
        read(name, refusing)
    with pytest.raises(DataError, match=r"a.jsonl:1: .* message 2 differently[\s\S]*task.loss_on=all"):
        read(name, forgetting)
    name = json_lines(tmp_path / "b.jsonl", [{"messages": [{"role": "user"}]}])
    with pytest.raises(DataError, match=r"b.jsonl:1: \{'role': 'user'\} is not a message"):
        read(name, render)


def test_a_tokenizer_with_a_template_writes_chats(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    plain = json_lines(tmp_path / "b.jsonl", [{"text": "".join(text for text, _ in LEARNED)}] * 20)
    tokenizer = small_task(plain).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    task = small_task(name, tokenizer=str(tmp_path / "tokenizer"), length=128)
    row = task.train_data()[0]
    learned = [token for token in row.targets.tolist() if token >= 0]
    chats = int(row.documents[-1]) + 1
    assert task.tokenizer.decode(learned) == "hello<end>see you<end>" * chats
    assert row.bytes == len("hello" + "see you") * chats  # and not the letters of the template
    row = small_task(name, tokenizer=str(tmp_path / "tokenizer"), length=128, loss_on="all").train_data()[0]
    assert row.bytes == len("".join(message["content"] for message in CHAT)) * (int(row.documents[-1]) + 1)
    prompt = task.prompt("bye")
    assert task.tokenizer.decode(prompt.ids) == "<user>bye<end><assistant>"
    assert prompt.text == "bye"


# ---- the part that is held back


def test_few_plain_texts_give_their_ends_and_many_give_whole_documents():
    text = "".join(f"line {number}\n" for number in range(100))
    kept, held = documents.divided([documents.Document((TextSegment(text, True),), "a")], 0.1, 0)
    assert kept[0].parts[0].text + held[0].parts[0].text == text
    assert 0.08 < len(held[0].parts[0].text) / len(text) < 0.12
    assert held[0].parts[0].text.startswith("line ")
    many = [documents.Document((TextSegment(str(number), True),), str(number)) for number in range(30)]
    kept, held = documents.divided(many, 0.1, 0)
    assert len(held) == 3
    assert sorted([*kept, *held], key=many.index) == many
    assert held == documents.divided(many, 0.1, 0)[1] != documents.divided(many, 0.1, 1)[1]
    answers = [
        documents.Document((TextSegment("q", False), TextSegment("a", True)), str(number)) for number in range(4)
    ]
    assert [len(part) for part in documents.divided(answers, 0.1, 0)] == [3, 1]


def test_training_and_evaluation_share_no_text(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(40)])
    task = small_task(name, eval_fraction=0.25)
    training, held = task.train_data().tokens, task.eval_data().tokens
    assert (len(training.places), len(held.places)) == (30, 10)
    assert not {*training.places} & {*held.places}
    alone = json_lines(tmp_path / "b.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(DataError, match="too little text to hold back some"):
        small_task(alone, eval_fraction=0.25).train_data()


# ---- tokenizers


def test_byte_pairs_write_every_text_and_letters_know_those_of_the_training(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"text": "abc cab"}] * 10)
    task = small_task(name)
    strange = "été 🎉\n\x00"
    ids = task.tokenizer(strange, add_special_tokens=False)["input_ids"]
    assert task.tokenizer.decode(ids) == strange
    task = small_task(name, tokenizer="characters")
    assert len(task.tokenizer) == 2 + len(set("abc "))
    assert task.tokenizer.decode(task.tokenizer("cab a")["input_ids"], skip_special_tokens=True) == "cab a"
    assert tokens.start_and_end(task.tokenizer) == ([0], [0])


def test_unknown_letters_are_counted_and_told(tmp_path):
    training = json_lines(tmp_path / "a.jsonl", [{"text": "abc cab"}] * 10)
    other = json_lines(tmp_path / "b.jsonl", [{"text": "abd"}])
    task = small_task(training, other, tokenizer="characters")
    assert task.eval_data().tokens.unknown == 1
    assert any(
        "1 letter that the tokenizer does not know (33.33%)" in line for line in task.presenter(task).log_header()
    )
    json_lines(tmp_path / "b.jsonl", [{"text": "xyzab"}])
    with pytest.raises(DataError, match="the tokenizer does not know 60% of the tokens"):
        small_task(training, other, tokenizer="characters").eval_data()


def test_long_texts_are_tokenised_in_blocks_and_no_letter_is_lost(monkeypatch):
    monkeypatch.setattr(tokens, "_BLOCK", 10)
    text = "one two\nthree\n" + "x" * 25 + "\nü"
    blocks = list(tokens._blocks(text))
    assert "".join(blocks) == text
    assert blocks[0] == "one two\n"
    assert max(map(len, blocks)) <= 10


@pytest.mark.parametrize("key", ["tokenizer", "model"])
def test_an_error_about_a_tokenizer_names_the_key_that_gives_it(tmp_path, key):
    name = json_lines(tmp_path / "a.jsonl", [{"text": "a b"}] * 10)
    tokenizer = small_task(name).tokenizer
    for role in ("bos", "eos", "pad"):
        setattr(tokenizer, f"{role}_token", None)
    tokenizer.save_pretrained(tmp_path / "none")
    with pytest.raises(UsageError, match=rf"^task.{key}: the tokenizer of .*none has neither"):
        _ = small_task(name, **{key: str(tmp_path / "none")}).tokenizer


def test_options_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="give either model"):
        LmOptions.model_validate({"model": "a", "config": "b"})
    with pytest.raises(ValueError, match="tokenizer bpe is new"):
        LmOptions.model_validate({"model": "a", "tokenizer": "bpe"})
    with pytest.raises(ValueError, match=r"width must be a multiple of 2 \* heads"):
        LmOptions.model_validate({"small": {"width": 100, "heads": 3}})


def test_configs_of_transformers_are_checked(tmp_path):
    name = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(10)])
    with pytest.raises(UsageError, match=r"no language model of type 'gpt'[\s\S]*gpt2"):
        _ = small_task(name, config={"model_type": "gpt"}).config
    with pytest.raises(UsageError, match=r"unknown key 'n_lyer'[\s\S]*n_layer"):
        _ = small_task(name, config={"model_type": "gpt2", "n_lyer": 2}).config
    task = small_task(name, config={"model_type": "gpt2", "n_positions": 16, "n_layer": 1})
    with pytest.raises(UsageError, match=r"task.length: 32 is more than the 16 positions"):
        task.train_data()
