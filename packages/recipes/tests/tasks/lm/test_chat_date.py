"""A chat template that prints the date prints that of the beginning of the run, also tomorrow."""

from datetime import datetime

import pytest

from lockstep_recipes.tasks.lm import chat_date, task
from tests.lm_cases import json_lines, small_task

FIRST, NEXT = datetime(2026, 11, 29, 23, 59), datetime(2026, 11, 30, 0, 1)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
MESSAGES = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
LLAMA = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n        {%- set date_string = "x" %}\n'
    "    {%- endif %}\n{%- endif %}\nToday: {{ date_string }}\n" + MESSAGES
)


def clock(now):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    return Clock


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [{"text": f"<user>hi<end><assistant>hello Today: {number} Nov Dec 20 26"} for number in range(40)]
    return small_task(json_lines(tmp_path_factory.mktemp("tokenizer") / "a.jsonl", texts)).tokenizer


def rendered(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA, "Today: 29 Nov 2026\n"),
        (
            "{{ strftime_now('%Y-%m-%d, %A %B %-d') }} at {{ strftime_now('%H:%M') }}\n",
            "2026-11-29, Sunday November 29",
        ),
        ("{% set form = '%d' ~ '/%m/%y' %}{{ strftime_now(form) }}", "29/11/26"),
        ("\n{{ strftime_now('%Y') }}", "\n2026"),
        ("{% macro head() %}{{ strftime_now('%Y') }}!{% endmacro %}{{ head() }}", "2026!"),
    ],
)
def test_templates_print_the_frozen_date_and_nothing_else_changes(tokenizer, template, expected):
    found = rendered(tokenizer, chat_date.frozen(template, FIRST))
    assert found.startswith(expected)
    frozen_again = chat_date.frozen(chat_date.frozen(template, FIRST), NEXT)
    assert rendered(tokenizer, frozen_again) == found
    assert chat_date.date_of(frozen_again) == "2026-11-29"
    if "%H" not in template:
        today = datetime.now()  # as transformers prints it today
        assert rendered(tokenizer, chat_date.frozen(template, today)) == rendered(tokenizer, template)


def test_templates_without_a_date_stay_as_they_are():
    assert chat_date.frozen(MESSAGES, FIRST) == MESSAGES
    assert chat_date.frozen(None, FIRST) is None
    assert chat_date.date_of(MESSAGES) is None
    both = chat_date.frozen({"default": MESSAGES, "dated": LLAMA}, FIRST)
    assert both["default"] == MESSAGES
    assert chat_date.date_of(both) == "2026-11-29"


def test_a_run_keeps_the_date_on_which_it_began(tokenizer, tmp_path, monkeypatch):
    tokenizer.chat_template = LLAMA
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    name = json_lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 30)
    options = {"tokenizer": str(tmp_path / "tokenizer"), "length": 128, "loss_on": "all"}

    def on(now, folder, trained):
        monkeypatch.setattr(task, "datetime", clock(now))
        made = small_task(name, **options)
        made.setup(folder, trained)
        text = made.tokenizer.decode(made.train_data()[0].ids)
        lines = [line for line in made.presenter(made).log_header() if "the date" in line]
        return text, made.tokenizer.decode(made.prompt("hi").ids), made.tokenizer.chat_template, lines

    first = on(FIRST, tmp_path / "run", False)
    assert "Today: 29 Nov 2026" in first[0]
    assert "Today: 29 Nov 2026" in first[1]
    assert first[3] == ["chat template: it prints the date 2026-11-29, which is kept with the run"]
    assert on(NEXT, tmp_path / "run", True) == first  # a restart, another rank, an evaluation, an export
    assert "Today: 30 Nov 2026" in on(NEXT, tmp_path / "another", False)[0]
