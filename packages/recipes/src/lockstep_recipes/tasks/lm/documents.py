"""Documents from text files and tables: plain texts, prompts with answers, and chats."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.lm.options import LmColumnsOptions, LmOptions
from lockstep_recipes.tasks.readers.columns import named, usual
from lockstep_recipes.tasks.readers.encodings import read_text
from lockstep_recipes.tasks.readers.input_files import find_files
from lockstep_recipes.tasks.readers.labels import written_list
from lockstep_recipes.tasks.readers.table import SUFFIXES, Source, Table

_TABLES = tuple(suffix for suffix in SUFFIXES if suffix != ".txt")
# Files of a folder that `datasets` saved.
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json", "*/dataset_info.json")
_FEW = 10  # with fewer plain documents, the end of each is held back instead of whole documents
_USUAL = {
    "messages": ("messages", "conversations", "conversation", "chat"),
    "prompt": ("prompt", "question", "instruction", "problem", "query"),
    "answer": ("answer", "response", "completion", "output", "solution"),
    "text": ("text", "content", "document", "body", "story", "code"),
}
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # other names of roles

Render = Callable[..., str]
"""A function that writes a chat as text. It takes a list of messages and `add_generation_prompt`."""


class TextSegment(NamedTuple):
    """A segment of a document. Tokens do not cross segment boundaries."""

    text: str
    counts: bool
    """True if the tokens of the segment are learned."""
    said: tuple[tuple[int, int], ...] | None = None
    """Start and end of the message contents, in characters. The rest was written by a chat template, and is not counted
    in bits per byte. None: everything is content."""


@dataclass(frozen=True)
class Document:
    """A text that is learned completely."""

    parts: tuple[TextSegment, ...]
    where: str
    """The place of the document, for messages."""
    is_chat: bool = False
    """True if a chat template wrote the text, including its start and end tokens."""

    @property
    def is_plain(self) -> bool:
        """True if the document is a text without prompt and answer."""
        return len(self.parts) == 1 and not self.is_chat


class Corpus:
    """The source of documents.

    Args:
        name: a text file, a folder or a pattern of text files, a table (CSV, TSV, JSON, JSON lines, Parquet), a folder
            that `datasets` saved, or a name on the hub; tables and names may end with `:SPLIT`.
        split: the split of a data set without a split in its name.
    """

    def __init__(self, name: str, options: LmOptions, split: str = "train") -> None:
        self.name, self.options = name, options
        path = Path(name)
        texts = path.is_file() and not name.lower().endswith(_TABLES)
        texts |= path.is_dir() and not any(file for saved in _SAVED for file in path.glob(saved))
        texts |= not path.exists() and glob.has_magic(name)
        self.source = None if texts else Source.parse(name, split=split, **options.of_csv(), subset=options.subset)

    def files(self) -> tuple[Path, ...]:
        """The files that contain the documents.

        Raises:
            DataError, UsageError: there is no such file, folder or data set, or a folder has no text files.
        """
        if self.source is not None:
            return self.source.files()
        return tuple(find_files([self.name], [suffix.lower() for suffix in self.options.suffixes]))

    def settings(self) -> tuple[object, ...]:
        """All options that determine the documents."""
        options = self.options
        settings = (self.source or [str(path) for path in self.files()], options.columns, options.separator)
        return (*settings, options.chat, options.after_prompt, options.loss_on)

    def read(self, render: Render | None) -> list[Document]:
        """All documents that are not blank.

        Args:
            render: the tokenizer's chat template. None: it has none.

        Raises:
            DataError: a file cannot be read, no column fits, or the template cannot write a chat. Names the place.
        """
        found = list(self._of_texts() if self.source is None else _of_table(self.source.read(), self.options, render))
        found = [document for document in found if any(part.text.strip() for part in document.parts)]
        if not found:
            raise DataError("no text", where=self.name, remedy="give files that contain text")
        return found

    def _of_texts(self) -> Iterator[Document]:
        separator = self.options.separator
        for path in self.files():
            text = read_text(path).replace("\r\n", "\n")
            texts = [text] if separator is None else text.split(separator)
            for number, part in enumerate(texts):
                place = str(path) if separator is None else f"{path}, document {number}"
                yield Document((TextSegment(part, True),), place)


def _of_table(table: Table, options: LmOptions, render: Render | None) -> Iterator[Document]:
    roles = choose(table, options.columns)
    columns = {role: [table.columns[name] for name in names] for role, names in roles.items()}
    learns_all = options.loss_on == "all"
    if ("messages" in roles or options.chat) and render is None:
        remedy = "use the tokenizer of a chat model"
        raise DataError("the tokenizer has no chat template", where="task.tokenizer", remedy=remedy)
    for row in range(len(table)):
        where = table.where(row)
        if "messages" in roles:
            assert render is not None
            messages = _messages(columns["messages"][0][row], where)
            yield Document(_chat(messages, render, learns_all, where), where, is_chat=True)
        elif "text" in roles:
            yield Document((TextSegment(_text(columns["text"][0][row], where, roles["text"][0]), True),), where)
        else:
            values = zip(roles["prompt"], columns["prompt"], strict=True)
            texts = [_text(column[row], where, name) for name, column in values]
            prompt = "\n".join(text for text in texts if text)
            answer = _text(columns["answer"][0][row], where, roles["answer"][0])
            if bool(prompt.strip()) != bool(
                answer.strip()
            ):  # an empty answer would teach the model to stop immediately
                role = "answer" if prompt.strip() else "prompt"
                what = f"the row has no {role} (column {' or '.join(map(repr, roles[role]))})"
                raise DataError(what, where=where, remedy="complete the row, or remove it")
            if options.chat:
                assert render is not None
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                yield Document(_chat(messages, render, learns_all, where), where, is_chat=True)
            else:
                yield Document(
                    (TextSegment(prompt + options.after_prompt, learns_all), TextSegment(answer, True)), where
                )


def choose(table: Table, given: LmColumnsOptions, *, needs_answer: bool = True) -> dict[str, list[str]]:
    """The names of the columns by role: `messages`, or `text`, or `prompt` and `answer`.

    Args:
        needs_answer: whether prompts need a column with answers.

    Raises:
        DataError: there is no such column, or none or several have a usual name. The error lists all columns.
    """
    names, where = list(table.columns), table.name
    wanted = {role: value for role, value in given.model_dump().items() if value is not None}
    if wanted:
        found = {
            role: [named(name, names, role, where) for name in (value if isinstance(value, list) else [value])]
            for role, value in wanted.items()
        }
        fits = found.keys() in ({"messages"}, {"text"}, {"prompt", "answer"})
        if not fits and (needs_answer or "prompt" not in found):
            remedy = "give messages, or text, or prompt and answer"
            raise DataError(f"columns for {' and '.join(found)}", where="task.columns", remedy=remedy)
        return found

    def find(role: str) -> str | None:
        return usual(_USUAL[role], names, role=role, where=where, names=names, needed=False)

    if (messages := find("messages")) is not None:
        return {"messages": [messages]}
    prompt = find("prompt")
    answer = find("answer") if needs_answer else None
    if prompt is not None and (answer is not None or not needs_answer):
        more = [name for name in names if name.lower() == "input" and prompt.lower() == "instruction"]
        return {"prompt": [prompt, *more]} | ({} if answer is None else {"answer": [answer]})
    if len(names) == 1:
        return {"text": names}
    return {"text": [str(usual(_USUAL["text"], names, role="text", where=where, names=names, needed=True))]}


def _text(value: Any, where: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"column {column!r} contains {value!r} ({type(value).__name__}), not text"
        raise DataError(what, where=where, remedy="name the columns with texts: task.columns")
    return value


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    remedy = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if isinstance(value, str):
        written = written_list(value)  # pandas writes a list as Python does
        try:
            value = json.loads(value) if written is None else written
        except ValueError as error:
            raise DataError(f"not a list of messages: {error}", where=where, remedy=remedy) from None
    messages = []
    for message in value if isinstance(value, Sequence) else [value]:
        known = isinstance(message, Mapping) and next(
            (keys for keys in (("role", "content"), ("from", "value")) if all(key in message for key in keys)), None
        )
        if isinstance(message, Mapping) and message.get("tool_calls"):
            what = "a message has tool_calls, which are not learned"
            raise DataError(what, where=where, remedy="remove the chat, or write the calls into the content as text")
        if not known or (content := _content(message[known[1]])) is None:
            raise DataError(f"{message!r} is not a message", where=where, remedy=remedy)
        role = str(message[known[0]])
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _content(value: Any) -> str | None:
    """The content of a message: a text, or parts `{type: text, text}` joined with line breaks. None: neither."""
    if isinstance(value, Sequence) and value and all(isinstance(part, Mapping) for part in value):
        texts = [part.get("text") if part.get("type") == "text" else None for part in value]
        return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    return value if isinstance(value, str) else None


def _chat(messages: list[dict[str, str]], render: Render, learns_all: bool, where: str) -> tuple[TextSegment, ...]:
    """The segments of a chat. Answers are learned, with their end tokens."""
    try:
        whole = render(messages, add_generation_prompt=False)
        if learns_all:
            return (TextSegment(whole, True, _said(whole, messages)),)
        parts, at = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            end = render(messages[: number + 1], add_generation_prompt=False)
            begin = _until_answer(messages[:number], end, render, where)
            if whole.startswith(end) and end.startswith(begin) and len(begin) >= at:
                answer, start = _answer(end[len(begin) :], message), len(begin)
            elif (found := _within(whole, messages[: number + 1], end, begin, at)) is not None:
                answer, start = found
            else:
                what = f"the chat template writes message {number} differently from its own generation prompt"
                raise DataError(what, where=where, remedy="set task.loss_on=all, or use a different tokenizer")
            parts += [TextSegment(whole[at:start], False), answer]
            at = start + len(answer.text)
    except DataError:
        raise
    except Exception as error:  # templates are programs, and may raise anything
        what = f"the chat template cannot write this chat: {type(error).__name__}: {error}"
        raise DataError(what, where=where, remedy="check the roles of the messages and their order") from error
    return (*parts, TextSegment(whole[at:], False)) if at < len(whole) else tuple(parts)


def _until_answer(before: list[dict[str, str]], end: str, render: Render, where: str) -> str:
    """The text before an answer, including the generation prompt of the template.

    Args:
        before: the messages before the answer.
        end: the text up to the end of the answer.
    """
    if before:
        return render(before, add_generation_prompt=True)
    # transformers does not write a chat without messages, so use the words that it writes after a different one
    question = [{"role": "user", "content": "?"}]
    asked = render(question, add_generation_prompt=True)
    asking = asked.removeprefix(render(question, add_generation_prompt=False))
    if not asking or asking not in end:
        what = "the chat starts with an answer, and the chat template does not show where the answer starts"
        raise DataError(what, where=where, remedy="remove this answer, or set task.loss_on=all")
    return end[: end.index(asking) + len(asking)]


def _within(
    whole: str, messages: list[dict[str, str]], end: str, begin: str, at: int
) -> tuple[TextSegment, int] | None:
    """The learned segment of the last of `messages`, and its start in the text of the whole chat. None: not found.

    Some templates write an answer differently if more messages follow, for example with an empty thought only after the
    last message. So the answer is searched for, with the same template text before and after it.

    Args:
        end, begin: the text of only these messages, and the text up to the generation prompt of the answer.
        at: the end of the previous answer in `whole`.
    """
    content = messages[-1]["content"].strip()
    asking = begin[begin.rstrip().rfind("\n") + 1 :]  # the last line, such as <|im_start|>assistant
    closing = end[end.rfind(content) + len(content) :]
    start = whole.find(asking, at) + len(asking)
    stop = whole.find(closing, start)
    if not (content and asking and closing) or start < at + len(asking) or stop < 0:
        return None
    if not whole.endswith(content, start, stop):
        return None
    return _answer(whole[start : stop + len(closing)], messages[-1]), start


def _answer(text: str, message: dict[str, str]) -> TextSegment:
    """The learned segment of an answer: everything except the line break that a template writes after the end token."""
    said = _said(text, [message])
    stop = len(text.rstrip())
    has_end = bool(said) and stop > said[0][1]  # otherwise the line break itself is the end
    return TextSegment(text[:stop] if has_end else text, True, said or None)


def _said(text: str, messages: list[dict[str, str]]) -> tuple[tuple[int, int], ...]:
    """Start and end of the content of each message in the text that a template wrote. Content that the template changed
    is not found."""
    found, at = [], 0
    for content in (message["content"] for message in messages):
        bare = content.strip()
        begin, length = text.find(bare, at), len(bare)
        margin = len(content) - len(content.lstrip())
        if begin - margin >= at and text.startswith(content, begin - margin):  # many templates strip it
            begin, length = begin - margin, len(content)
        if begin >= 0:
            at = begin + length
            found.append((begin, at))
    return tuple(found)


def divided(documents: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Documents for training, and documents held back for evaluation.

    Whole documents are drawn. With fewer than ten plain texts, the end of each is held back, starting after a line
    break.
    """
    if len(documents) < _FEW and all(document.is_plain for document in documents):
        kept, held = [], []
        for document in documents:
            text = document.parts[0].text
            at = text.rfind("\n", 0, round(len(text) * (1 - share))) + 1 or round(len(text) * (1 - share))
            kept.append(Document((TextSegment(text[:at], True),), document.where))
            held.append(Document((TextSegment(text[at:], True),), f"{document.where}, from character {at}"))
        return kept, [document for document in held if document.parts[0].text.strip()]
    count = min(max(1, round(len(documents) * share)), len(documents) - 1)
    chosen = set(np.random.default_rng(seed).permutation(len(documents))[:count].tolist())
    kept = [document for number, document in enumerate(documents) if number not in chosen]
    return kept, [documents[number] for number in sorted(chosen)]
