"""Conversations: the loss is of answers alone, and what is left out or cut is said.

transformers is imported by the tests themselves: it takes seconds, and quick tests do not need it.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.common.data.columns import column_of
from headwater.common.errors import EmptyDataset, MissingData
from headwater.common.model.parameters import ModelImage
from headwater.common.task import load_task, open_train_examples
from headwater.simulation.api import simulate
from tests.additivity import check_additive

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PADDING = -100
END = "<|end|>"
TURN = "{{ '<' + message['role'] + '>' + message['content'] + eos_token + '\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
# As ChatML has it: no tags, and a new line after each end.
TURNS = "{% for message in messages %}" + TURN + "{% endfor %}" + ASKS
# As Qwen 3 has it: the last answer begins with thoughts, which earlier ones no longer have.
THINKS = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<assistant><think></think>' + message['content'] + eos_token + '\\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASKS
)
# As Gemma has it: no system's message.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TURNS
)
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
LINES = [
    json.dumps({"messages": MESSAGES}),
    "",
    "no JSON",
    json.dumps({"text": "no conversation"}),
    json.dumps({"messages": [{"role": "user", "content": "alone"}]}),
    json.dumps({"messages": [*MESSAGES[:1], {"role": "assistant", "content": " "}]}),
    json.dumps({"messages": [*MESSAGES[:1], {"role": "assistant", "content": None}]}),
    json.dumps([1]),
    "{]",
    json.dumps({"messages": MESSAGES[:2]}),
]


@pytest.fixture(scope="module")
def chat() -> Any:
    """Return the example's module."""
    return import_module("examples.chat_lm")


def with_template(chat: Any, template: str, **attributes: Any) -> Any:
    return type("Mine", (chat.ChatLm,), {"chat_template": template, **attributes})()


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def conversation(*contents: str) -> str:
    """Return a line of messages whose roles take turns."""
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return json.dumps({"messages": messages})


def answers(task: Any, examples: list[Tensor]) -> list[str]:
    """Return the targets of each example."""
    return [task.tokenizer.decode(targets[targets != PADDING]) for _, targets in examples]


def without_tags(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


@pytest.mark.parametrize("kind", ["ChatLm", "ChatLmLora"])
def test_the_task_is_additive_on_its_sample(kind: str) -> None:
    task = load_task(f"examples/chat_lm.py:{kind}")
    examples = task.train_examples(data=None, part=1, num_parts=9)
    check_additive(task, ModelImage(task.new_model()).model, examples)


def test_the_loss_falls_and_the_sample_is_an_answer(chat: Any) -> None:
    task = chat.ChatLm()
    run = simulate(
        task, clients=3, rounds=2, accumulation_steps=3, optimizer="adamw", learning_rate=0.01
    )
    assert run.history[-1].loss < run.history[0].loss
    assert task.sample(run.model).startswith("What is a string?\n")


def test_answers_and_their_ends_are_the_only_targets(chat: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "chats.jsonl", json.dumps({"messages": MESSAGES}))
    task = chat.ChatLm()
    [example] = examples = task.read(data)
    assert answers(task, examples) == [f"Hello!{END}See you.{END}"]
    text = f"user: Hi\nassistant: Hello!{END}\nuser: Bye\nassistant: See you.{END}\n"
    assert task.tokenizer.decode(example[0]) == text[:-1]  # the last token predicts none


@pytest.mark.parametrize("name", ["PLAIN_TEMPLATE", "TURNS"])
def test_without_tags_the_targets_are_the_same(chat: Any, tmp_path: Path, name: str) -> None:
    data = written(tmp_path / "chats.jsonl", json.dumps({"messages": MESSAGES}))
    template = TURNS if name == "TURNS" else without_tags(chat.PLAIN_TEMPLATE)
    assert "generation %" not in template
    task = with_template(chat, template)
    assert answers(task, task.read(data)) == [f"Hello!{END}See you.{END}"]
    if name == "PLAIN_TEMPLATE":
        assert torch.equal(task.read(data)[0], chat.ChatLm().read(data)[0])


def test_the_loss_is_transformers_own_with_labels_of_the_answers(chat: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", json.dumps({"messages": MESSAGES}), conversation("a", "b"))
    task = chat.ChatLm()
    model = task.new_model()
    loss, weight, _ = task.loss_sum(model, task.collate(task.read(data)))
    expected, count = torch.zeros(()), 0
    for messages in (MESSAGES, json.loads(conversation("a", "b"))["messages"]):
        coded = task.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        tokens = coded["input_ids"]
        labels = tokens.where(torch.as_tensor(coded["assistant_masks"]).bool(), PADDING)
        number = int((labels != PADDING).sum())
        expected = expected + model(input_ids=tokens, labels=labels).loss * number
        count += number
    assert weight == count
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    trained = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_template_that_changes_earlier_messages_is_refused_and_its_remedy_works(
    chat: Any, tmp_path: Path
) -> None:
    data = written(tmp_path / "chats.jsonl", json.dumps({"messages": MESSAGES}))
    with pytest.raises(ValueError, match=r"have other tokens: message 2; set is_split = True"):
        with_template(chat, THINKS).read(data)
    task = with_template(chat, THINKS, is_split=True)
    examples = task.read(data)
    assert answers(task, examples) == [
        f"<think></think>Hello!{END}",
        f"<think></think>See you.{END}",
    ]
    before = f"<user>Hi{END}\n<assistant>Hello!{END}\n<user>Bye{END}\n<assistant>"
    assert task.tokenizer.decode(examples[1][0]).startswith(before + "<think>")
    assert column_of(task, examples, "text").codes_E.tolist() == [0, 0]


def test_an_answer_that_shares_a_token_with_its_question_is_left_out_by_name(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizers = import_module("tokenizers")
    task = with_template(chat, TURNS)
    backend = task.tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab() | {">h": 257}
    backend.model = tokenizers.models.BPE(vocab=vocabulary, merges=[(">", "h")])
    data = written(tmp_path / "chats.jsonl", conversation("a", "hi"), conversation("a", "Hi"))
    assert answers(task, task.read(data)) == [f"Hi{END}"]
    assert "before it have other tokens: message 2): chats.jsonl:1" in caplog.text


def test_a_template_without_a_way_to_tell_answers_is_refused(chat: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "chats.jsonl", json.dumps({"messages": MESSAGES}))
    backwards = "{% for message in messages | reverse %}" + TURN + "{% endfor %}" + ASKS
    with pytest.raises(ValueError, match=r"cannot be trained on: .*set chat_template to one with"):
        with_template(chat, backwards, is_split=True).read(data)


def test_a_conversation_that_the_template_refuses_is_left_out_by_name(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = json.dumps({"messages": [{"role": "system", "content": "Be kind."}, *MESSAGES]})
    task = with_template(chat, NO_SYSTEM)
    data = written(tmp_path / "chats.jsonl", system, conversation("a", "b"))
    assert answers(task, task.read(data)) == [f"b{END}"]
    assert "refuses it: System role not supported): chats.jsonl:1" in caplog.text


def test_a_tokenizer_without_a_template_is_named_and_its_remedy_works(
    chat: Any, tmp_path: Path
) -> None:
    lm = import_module("examples.causal_lm")
    lm.LlamaForCausalLM(lm.small_config(257)).save_pretrained(tmp_path)
    lm.byte_tokenizer().save_pretrained(tmp_path)
    mine: Any = type("Mine", (chat.ChatLm,), {"folder": str(tmp_path)})
    data = written(tmp_path / "chats.jsonl", conversation("a", "b"))
    with pytest.raises(ValueError, match=r"no chat template: set .* PLAIN_TEMPLATE"):
        mine().read(data)
    mine.chat_template = chat.PLAIN_TEMPLATE
    assert answers(mine(), mine().read(data)) == [f"b{END}"]


def test_lines_that_are_no_conversations_are_counted_and_named(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = written(tmp_path / "chats.jsonl", *LINES)
    with data.open("ab") as file:
        file.write(conversation("a", "b").encode().replace(b"b", b"\xff"))
    task = chat.ChatLm()
    examples = task.read(data)
    assert answers(task, examples) == [f"Hello!{END}See you.{END}", f"Hello!{END}"]
    assert column_of(task, examples, "text").codes_E.tolist() == [0, 1]
    for part in (
        "2 (not JSON): chats.jsonl:3, chats.jsonl:9",
        "2 (no list of messages): chats.jsonl:4, chats.jsonl:8",
        "1 (no message of the assistant): chats.jsonl:5",
        "1 (an empty answer): chats.jsonl:6",
        "1 (a message without role or content as text): chats.jsonl:7",
        "1 (not UTF-8): chats.jsonl:11",
    ):
        assert f"{data}: left out {part}" in caplog.text


def test_half_a_character_in_an_escape_takes_its_line_alone(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as of an emoji that something cut in the middle: a tokenizer takes no such text."""
    half = conversation("a", "b").replace('"a"', r'"a \ud83d"')
    data = written(tmp_path / "chats.jsonl", half, conversation("c", "d"))
    task = chat.ChatLm()
    assert answers(task, task.read(data)) == [f"d{END}"]
    assert "left out 1 (not UTF-8): chats.jsonl:1" in caplog.text


def test_a_file_may_begin_with_a_mark_of_its_encoding(chat: Any, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(conversation("a", "b") + "\n", encoding="utf-8-sig")
    task = chat.ChatLm()
    assert answers(task, task.read(data)) == [f"b{END}"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_without_a_line_is_an_empty_data_set(
    chat: Any, tmp_path: Path, is_packed: bool
) -> None:
    task: Any = type("Mine", (chat.ChatLm,), {"is_packed": is_packed})()
    with pytest.raises(EmptyDataset):
        open_train_examples(task, data=written(tmp_path / "chats.jsonl"), part=0, num_parts=1)


def test_data_without_any_conversation_is_an_error_with_the_reasons(
    chat: Any, tmp_path: Path
) -> None:
    data = written(tmp_path / "chats.jsonl", "no JSON")
    with pytest.raises(MissingData, match=r"1 \(not JSON\): chats.jsonl:1"):
        open_train_examples(chat.ChatLm(), data=data, part=0, num_parts=1)
    data.unlink()
    with pytest.raises(MissingData, match=r"expected conversations in \*.jsonl files"):
        open_train_examples(chat.ChatLm(), data=tmp_path, part=0, num_parts=1)


def test_what_a_cut_loses_is_counted(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = with_template(chat, TURNS, context=24)
    # `<user>a<|end|>\n<assistant>` has 6 + 1 + 1 + 1 + 11 tokens.
    data = written(
        tmp_path / "chats.jsonl",
        conversation("a", "b"),
        conversation("a", "0123456789"),
        conversation("a" * 30, "b"),
    )
    examples = task.read(data)
    assert answers(task, examples) == [f"b{END}", "01234"]
    assert column_of(task, examples, "text").codes_E.tolist() == [0, 1]
    assert "2 of 3 conversations are longer than context = 24 tokens and were cut: 8 of 15" in (
        caplog.text
    )
    assert "1 conversations without any answer before the cut" in caplog.text


def test_packed_conversations_lose_no_answer(chat: Any, tmp_path: Path) -> None:
    task = with_template(chat, TURNS, context=24, is_packed=True)
    lines = [conversation("a" * 70, "0123456789"), conversation("a", "b", "c", "d")]
    examples = task.read(written(tmp_path / "chats.jsonl", *lines))
    assert "".join(answers(task, examples)) == f"0123456789{END}b{END}d{END}"
    assert all((example[1] != PADDING).any() for example in examples)
    check_additive(task, ModelImage(task.new_model()).model, examples)


def test_a_folder_has_the_conversations_of_all_its_files(chat: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    written(tmp_path / "a.jsonl", conversation("a", "b"))
    written(tmp_path / "more" / "c.jsonl", conversation("c", "d"))
    written(tmp_path / "README.md", "no conversation")
    task = chat.ChatLm()
    assert answers(task, task.read(tmp_path)) == [f"b{END}", f"d{END}"]
