"""Language models trained on conversations: the loss is of the assistant's answers alone.

``ChatLm`` is ``causal_lm.py`` with other data. ``--data`` takes a file of JSON lines, or a folder
of such files (``*.jsonl``); each line is a conversation::

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

The tokenizer's chat template makes tokens of it. Its ``{% generation %}`` tags say which of these
are answers. Without tags an answer is what the template adds to the messages before it, which must
stay as they were. An answer's end token is predicted too. As it stands, the class trains a small
Llama to explain Python's help topics::

    headwater-simulate --task examples/chat_lm.py:ChatLm --clients 5 \
        --optimizer adamw --learning-rate 0.003

For a model of your own, which the server and every device have in a folder, write a file::

    from headwater.examples.chat_lm import ChatLm

    class MyAssistant(ChatLm):
        folder = "~/models/mine"
        lora_rank = 8
        context = 1024

What cannot be trained on is left out, counted, and named by file and line in the log; so are
conversations longer than ``context`` tokens, which are cut. With ``is_packed`` conversations are
joined before they are cut, and no answer is lost.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from torch import Tensor, nn

from headwater.examples.causal_lm import CausalLm, TokenExamples, cut, help_texts
from headwater.examples.language_model_loss import PADDING

ROLE, CONTENT, ASSISTANT = "role", "content", "assistant"
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""``user: Hi``, a new line, ``assistant: Hello!``, and the end token."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
NUM_NAMED = 5  # lines of a file that the log names for each reason
PROBE = [
    {ROLE: "user", CONTENT: "one"},
    {ROLE: "assistant", CONTENT: "two"},
    {ROLE: "user", CONTENT: "three"},
    {ROLE: "assistant", CONTENT: "four"},
]
CHANGES = "once an answer is there, the messages before it have other tokens: message"

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]


class CodedChat(NamedTuple):
    """A conversation's tokens, which of them are the assistant's, and its number."""

    tokens: list[int]
    is_answer: list[bool]
    number: int


class UnusableChat(ValueError):
    """A conversation that cannot be trained on; the text says why."""


class ChatLm(CausalLm):
    """The conversation so far in, the assistant's next token out."""

    context = 512
    prompt = "What is a string?"
    chat_template: str | None = None
    """A template in place of the tokenizer's own, such as ``PLAIN_TEMPLATE``."""
    is_split = False
    """Whether each answer is an example by itself, after the messages before it."""

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer with its chat template.

        Raises:
            ValueError: it has none.
        """
        found = super().tokenizer
        if self.folder is None or self.chat_template is not None:
            found.chat_template = self.chat_template or PLAIN_TEMPLATE
        if found.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self.folder} has no chat template: set chat_template in the "
                "task, to that of the model's family or to PLAIN_TEMPLATE of "
                "headwater.examples.chat_lm"
            )
        return found

    def read(self, path: Path) -> TokenExamples:
        """Return the examples of a file or folder of conversations."""
        return self.examples_of(chat_lines(path), str(path))

    @cached_property
    def bundled(self) -> tuple[TokenExamples, TokenExamples]:
        train, test = help_texts()
        return self.explained(train), self.explained(test)

    def explained(self, texts: Sequence[str]) -> TokenExamples:
        """Return the examples of help texts, each as a question and an answer."""
        lines = ((f"text {at}", json.dumps(help_chat(text))) for at, text in enumerate(texts))
        return self.examples_of(lines, "the help texts")

    def sample(self, model: nn.Module) -> str | None:
        """Return ``prompt``, and below it what the model answers."""
        if self.prompt is None:
            return None
        return f"{self.prompt}\n{self.continuation(model, self.coded_prompt(self.prompt))}"

    def coded_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of the prompt as a user's message, up to where the answer begins."""
        return self._rendered([{ROLE: "user", CONTENT: prompt}], is_asking=True)

    def examples_of(self, lines: Iterable[tuple[str, str]], source: str) -> TokenExamples:
        """Return the examples of conversations, which are given as places and lines of JSON.

        Raises:
            ValueError: the template's answers cannot be told from the rest, or no line can be
                trained on.
        """
        self._check_template()
        chats: list[CodedChat] = []
        unusable: dict[str, list[str]] = defaultdict(list)
        for number, (place, line) in enumerate(lines):
            try:
                chats += self.coded(messages_in(line), number)
            except UnusableChat as error:
                unusable[str(error)].append(place)
        for reason, places in unusable.items():
            log.warning("%s: left out %s", source, _counted(reason, places))
        if unusable and not chats:
            reasons = "; ".join(_counted(*one) for one in unusable.items())
            raise ValueError(f"no conversation in {source} can be trained on: {reasons}")
        return self._joined(chats) if self.is_packed else self._cut(chats, source)

    def coded(self, messages: Messages, number: int = 0) -> list[CodedChat]:
        """Return a conversation's tokens; with ``is_split`` those up to each answer.

        Raises:
            UnusableChat: the template refuses it, or its answers cannot be told from the rest.
        """
        answers = [at for at, message in enumerate(messages) if message[ROLE] == ASSISTANT]
        try:
            if self.is_split:
                return [self._compared(messages[: at + 1], [at], number) for at in answers]
            if self.tokenizer.is_fast and GENERATION.search(self.tokenizer.get_chat_template()):
                return [self._tagged(messages, number)]
            return [self._compared(messages, answers, number)]
        except TemplateError as error:
            raise UnusableChat(f"the chat template refuses it: {error}") from error

    def _tagged(self, messages: Messages, number: int) -> CodedChat:
        """Return a conversation's tokens, with the answers that the template's tags enclose."""
        found = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        return CodedChat(found["input_ids"], [*map(bool, found["assistant_masks"])], number)

    def _compared(self, messages: Messages, answers: Sequence[int], number: int) -> CodedChat:
        """Return a conversation's tokens; an answer is what comes after the messages before it.

        What a template adds after the end token, such as a new line, is no answer: no model is
        asked for it.

        Raises:
            UnusableChat: the messages before an answer have other tokens without it. The template
                changes them, or the answer's first letters make one token with what is before.
        """
        tokens, end = self._rendered(messages), self.tokenizer.eos_token_id
        is_answer = [False] * len(tokens)
        for at in answers:
            before = self._rendered(messages[:at], is_asking=True)
            until = self._rendered(messages[: at + 1])
            if tokens[: len(before)] != before or tokens[: len(until)] != until:
                raise UnusableChat(f"{CHANGES} {at + 1}")
            answer = until[len(before) :]
            size = len(answer) - answer[::-1].index(end) if end in answer else len(answer)
            is_answer[len(before) : len(before) + size] = [True] * size
        return CodedChat(tokens, is_answer, number)

    def _rendered(self, messages: Messages, *, is_asking: bool = False) -> list[int]:
        found = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=is_asking, return_dict=True
        )
        return cast(list[int], found["input_ids"])

    def _check_template(self) -> None:
        """Check that the answers of a plain conversation can be told from the rest.

        Raises:
            ValueError: they cannot.
        """
        try:
            self.coded(PROBE)
        except UnusableChat as error:
            remedy = (
                "set chat_template to one with {% generation %} tags"
                if self.is_split
                else "set is_split = True, or chat_template to one with {% generation %} tags"
            )
            raise ValueError(
                f"a plain conversation cannot be trained on: {error}; {remedy}"
            ) from error

    def _joined(self, chats: Sequence[CodedChat]) -> TokenExamples:
        """Return examples of joined conversations; those without any answer are left out."""
        tokens = [token for chat in chats for token in chat.tokens]
        is_answer = [one for chat in chats for one in chat.is_answer]
        examples = cut(tokens, is_answer, self.context) if tokens else ()
        return TokenExamples(filter(_has_target, examples))

    def _cut(self, chats: Sequence[CodedChat], source: str) -> TokenExamples:
        """Return an example of each conversation, of its first tokens."""
        firsts = [(cut(chat.tokens, chat.is_answer, self.context)[0], chat) for chat in chats]
        cut_off = [sum(chat.is_answer[self.context + 1 :]) for chat in chats]
        kept = [(example, chat.number) for example, chat in firsts if _has_target(example)]
        if any(cut_off):
            log.warning(
                "%s: %d of %d conversations are longer than context = %d tokens and were cut: %s "
                "of %s tokens of answers are lost, and %d conversations without any answer before "
                "the cut; set a larger context, or is_packed = True",
                source,
                sum(map(bool, cut_off)),
                len(chats),
                self.context,
                f"{sum(cut_off):,}",
                f"{sum(sum(chat.is_answer) for chat in chats):,}",
                len(chats) - len(kept),
            )
        return TokenExamples((example for example, _ in kept), [number for _, number in kept])


class ChatLmLora(ChatLm):
    """The same with adapters of rank 8."""

    lora_rank = 8


def chat_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, after its place, FILE:LINE; of a folder all ``*.jsonl``.

    Bytes that are not UTF-8 become surrogates, which ``messages_in`` finds.

    Raises:
        FileNotFoundError: there is no file.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"expected conversations in *.jsonl files, there are none at {path}"
        )
    for file in files:
        # A file of Windows may begin with a mark of its encoding.
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield f"{file.name}:{number}", line


def messages_in(line: str) -> Messages:
    """Return a line's messages.

    Raises:
        UnusableChat: it is no conversation with an answer in text.
    """
    try:
        line.encode()
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # an escape may stand for half a character
    except UnicodeEncodeError as error:
        raise UnusableChat("not UTF-8") from error
    except ValueError as error:
        raise UnusableChat("not JSON") from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UnusableChat("no list of messages")
    for message in messages:
        texts = message if isinstance(message, dict) else {}
        if not isinstance(texts.get(ROLE), str) or not isinstance(texts.get(CONTENT), str):
            raise UnusableChat("a message without role or content as text")
    answers = [message[CONTENT] for message in messages if message[ROLE] == ASSISTANT]
    if not answers:
        raise UnusableChat("no message of the assistant")
    if not all(answer.strip() for answer in answers):
        raise UnusableChat("an empty answer")
    return messages


def help_chat(text: str) -> dict[str, Messages]:
    """Return a help text as a question for its title, and its first paragraph as the answer."""
    title, _, rest = text.partition("\n")
    paragraph = next((part for part in rest.split("\n\n")[1:] if part.strip()), rest)
    answer = " ".join(paragraph.split())[:300]
    return {
        "messages": [
            {ROLE: "user", CONTENT: f"Explain: {title}"},
            {ROLE: ASSISTANT, CONTENT: answer},
        ]
    }


def _has_target(example: Tensor) -> bool:
    return bool((example[1] != PADDING).any())


def _counted(reason: str, places: Sequence[str]) -> str:
    """Return how many lines there are for a reason, with the first of them by name."""
    named = ", ".join(places[:NUM_NAMED]) + (", ..." if len(places) > NUM_NAMED else "")
    return f"{len(places)} ({reason}): {named}"
