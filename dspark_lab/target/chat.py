"""Chat template -> token ids and the assistant-only loss mask, from ids alone.

A template is trusted only as far as its *prefix property* holds: what it renders to ask for an assistant turn must be a
prefix of that turn once written, and the written turn a prefix of the whole conversation. Then the assistant's tokens
are what lies between the two, and no text is ever searched. A turn for which it fails is refused by name.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import torch

from dspark_lab.records import Conversation, Message, TokenizedConversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["all", "last"]

# Exercises digit splitting, runs of spaces, newlines, scripts, code: where two tokenizers of one vocabulary differ.
PROBE_TEXT = "It's 1234567.89\n\n\tdef f(x):  return x**2   # Grüße, 你好 🙂 <|im_end|></s>\r\n"

MAX_UNMASKABLE_SHARE = 0.05


class UnmaskableTurnError(ValueError):
    """The template does not render this turn such that its tokens can be told from the template's."""


class RewrittenTurnError(UnmaskableTurnError):
    """The template renders this turn differently once later messages follow."""


def tokenize(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    enable_thinking: bool | None = None,
    turns: Turns = "all",
) -> TokenizedConversation:
    """Ids [T] of ``conversation`` and the mask [T] of the tokens that the assistant wrote.

    A regenerated conversation is its rendered prompt followed by ``answer_token_ids``, which alone are supervised. Else
    the assistant turns among the messages are (all, or the last one with ``turns="last"``), each through its
    end-of-turn token; what the template adds after that token (ChatML's newline) is not. Special tokens come only from
    the template. A conversation without an assistant turn comes back with an empty mask: callers count it.

    Raises UnmaskableTurnError (a ValueError) where the template's prefix property does not hold; ValueError for a
    tokenizer without template, messages that the template refuses, or an ``enable_thinking`` that it does not know.
    """
    render = _Renderer(tokenizer, enable_thinking)
    if conversation.answer_token_ids is not None:
        prompt = tokenize_prompt(conversation.messages, tokenizer, enable_thinking=enable_thinking)
        token_ids = prompt + list(conversation.answer_token_ids)
        spans = [(len(prompt), len(token_ids))]
    else:
        token_ids = render(conversation.messages)
        try:
            spans = _assistant_spans(conversation.messages, token_ids, render, turns)
        except UnmaskableTurnError as error:
            raise type(error)(f"conversation {conversation.id!r}, {error}") from None
    loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
    for start, end in spans:
        loss_mask[start:end] = True
    return TokenizedConversation(
        id=conversation.id,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        loss_mask=loss_mask,
        domain=conversation.domain,
        sampling=conversation.sampling,
        source=conversation.source,
    )


def tokenize_turns(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", *, enable_thinking: bool | None = None
) -> list[TokenizedConversation]:
    """The conversation as one sample, or as one per assistant turn where the template rewrites earlier turns.

    Each of several samples ends with its turn, the only one supervised, after the history as the template renders it
    for that turn: what the target sees when it writes. Raises what ``tokenize`` does.
    """
    try:
        return [tokenize(conversation, tokenizer, enable_thinking=enable_thinking)]
    except RewrittenTurnError:
        return [
            tokenize(cut, tokenizer, enable_thinking=enable_thinking, turns="last")
            for cut in one_sample_per_turn(conversation)
        ]


def tokenize_maskable(
    conversations: Sequence[Conversation], tokenizer: "PreTrainedTokenizerBase", *, enable_thinking: bool | None = None
) -> tuple[list[TokenizedConversation], list[str]]:
    """The samples of all conversations that can be masked, and of each other one the reason why it cannot.

    Raises ValueError when more than ``MAX_UNMASKABLE_SHARE`` cannot: then template and data do not fit each other.
    """
    samples: list[TokenizedConversation] = []
    unmaskable: list[str] = []
    for conversation in conversations:
        try:
            samples += tokenize_turns(conversation, tokenizer, enable_thinking=enable_thinking)
        except UnmaskableTurnError as error:
            unmaskable.append(str(error))
    if len(unmaskable) > MAX_UNMASKABLE_SHARE * len(conversations):
        raise ValueError(
            f"{len(unmaskable)} of {len(conversations)} conversations cannot be masked with this target's chat template "
            f"({MAX_UNMASKABLE_SHARE:.0%} may be left out); the first: {unmaskable[0]}"
        )
    return samples, unmaskable


def tokenize_prompt(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, enable_thinking: bool | None = None
) -> list[int]:
    """Ids after which the target writes its answer: ``messages`` and the template's generation prompt.

    Raises ValueError when the messages are empty or already end with the assistant's turn.
    """
    if messages and messages[-1].get("role") == "assistant":
        raise ValueError(
            f"messages: a prompt ends before the assistant's turn, but the last of {len(messages)} messages has role "
            "'assistant'; drop that message"
        )
    return _Renderer(tokenizer, enable_thinking)(messages, add_generation_prompt=True)


def one_sample_per_turn(conversation: Conversation) -> list[Conversation]:
    """The conversation cut after each assistant turn, for ``tokenize(..., turns="last")``.

    It is the mend for templates that render a turn differently once others follow (thinking dropped from history).
    """
    return [
        replace(conversation, id=f"{conversation.id}/turn-{turn}", messages=conversation.messages[: turn + 1])
        for turn in _assistant_turns(conversation.messages)
    ]


def template_hash(tokenizer: "PreTrainedTokenizerBase", *, enable_thinking: bool | None = None) -> str:
    """Identity of what turns messages into ids: vocabulary, behaviour on a probe text, chat template and its options.

    The serialised tokenizer is not hashed, because its format changes between library versions.
    """
    identity = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "probe": tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"],
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "enable_thinking": enable_thinking,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


class _Renderer:
    """Messages -> ids through one template with fixed options."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", enable_thinking: bool | None) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template, but messages were given; use an instruct "
                "model's tokenizer, or set tokenizer.chat_template"
            )
        self.options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if self.options and "enable_thinking" not in str(tokenizer.chat_template):
            raise ValueError(
                f"enable_thinking={enable_thinking} cannot take effect: the chat template of "
                f"{tokenizer.name_or_path!r} does not know it; leave it unset (null)"
            )
        self.tokenizer = tokenizer

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
        if not messages:
            raise ValueError("messages: empty; a conversation needs at least one message")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options,
            )
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(f"messages: the chat template refuses the roles {roles}: {error}") from error
        assert isinstance(text, str)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def turn_ending(self) -> tuple[list[int], int]:
        """(ids that follow an assistant's content, how many of them the assistant writes itself).

        The ids are the common suffix of two turns that differ in content only. The assistant writes through the first
        special token (its end of turn); without one it writes none of them, as a plain-text ending never stops it.
        """
        one, other = (
            self([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}])
            for content in ("a", "b")
        )
        length = _common_prefix(one[::-1], other[::-1])
        assert length < len(one), "the tokenizer cannot tell 'a' from 'b'"
        ending = one[len(one) - length :]
        special = set(self.tokenizer.all_special_ids)
        special.update(index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return ending, next((index + 1 for index, token in enumerate(ending) if token in special), 0)


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _assistant_spans(
    messages: Sequence[Message], token_ids: list[int], render: _Renderer, turns: Turns
) -> list[tuple[int, int]]:
    """[start, end) of the tokens that the assistant wrote, per supervised turn."""
    supervised = _assistant_turns(messages)
    if turns == "last":
        supervised = supervised[-1:]
    return [_assistant_span(messages, turn, token_ids, render) for turn in supervised]


def _assistant_span(messages: Sequence[Message], turn: int, token_ids: list[int], render: _Renderer) -> tuple[int, int]:
    if turn == 0:
        raise UnmaskableTurnError(
            "turn 0: the conversation begins with the assistant; put the user's message before it"
        )
    asked = render(messages[:turn], add_generation_prompt=True)
    written = render(messages[: turn + 1])
    start, end = len(asked), len(written)
    if written[:start] != asked:
        raise UnmaskableTurnError(
            f"turn {turn}: the template's generation prompt is not a prefix of the written turn (they part at token "
            f"{_common_prefix(asked, written)} of {start}), so its first tokens cannot be told from the template's; "
            "enable_thinking may contradict the turn's reasoning_content, the content may begin with white space, or the "
            "template drop earlier thoughts once the turn is there; regenerate the answers if so"
        )
    if token_ids[:end] != written:
        raise RewrittenTurnError(
            f"turn {turn}: the template renders this turn differently once later messages follow (they part at token "
            f"{_common_prefix(written, token_ids)} of {end}), as templates do that drop the thinking of earlier turns; "
            "make one sample per turn: one_sample_per_turn() with turns='last'"
        )
    _check_reasoning(messages, turn, written, render)
    ending, num_written = render.turn_ending
    if written[end - len(ending) :] != ending or end - len(ending) < start:
        raise UnmaskableTurnError(
            f"turn {turn}: it does not end as the template ends other assistant turns (expected the ids {ending}); "
            "check its content for trailing white space or special tokens"
        )
    return start, end - len(ending) + num_written


def _check_reasoning(messages: Sequence[Message], turn: int, written: list[int], render: _Renderer) -> None:
    message = messages[turn]
    if not message.get("reasoning_content"):
        return
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    if render([*messages[:turn], plain]) == written:
        raise UnmaskableTurnError(
            f"turn {turn}: the template drops this turn's reasoning_content; regenerate the answer, remove it, or put "
            "it into content"
        )


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
