"""Rows of published datasets -> chat messages: the column names that are recognised, and a mapping for all others."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dspark_lab.records import Message

MESSAGES = ("messages", "conversations", "conversation")
PROMPT = ("prompt", "instruction", "question")
INPUT = ("input",)
RESPONSE = ("response", "completion", "answer", "output")
SYSTEM = ("system", "system_prompt")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column holds what. Either ``messages`` or ``prompt`` is given; null: there is no such column.

    ``messages``: a list of {role, content} or, as ShareGPT has it, {from, value}. ``prompt`` and ``response``: text, or
    lists of such messages. ``input``: text that belongs to the prompt, below it. ``system``: text of a system message.
    """

    messages: str | None = None
    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("columns: give either messages or prompt, e.g. {prompt: text, response: null}")
        if self.messages is not None and (self.input or self.response):
            raise ValueError(
                f"columns: messages={self.messages!r} holds all turns: input and response cannot take effect beside it"
            )


def recognise(names: Collection[str]) -> Columns:
    """What columns of these names hold: chat messages if there are any, else a prompt with or without its response.

    Raises ValueError that lists the columns and shows a mapping when no name is known.
    """
    system = _first(SYSTEM, names)
    if messages := _first(MESSAGES, names):
        return Columns(messages=messages, system=system)
    prompt = _first(PROMPT, names)
    if prompt is None:
        known = ", ".join(MESSAGES + PROMPT)
        raise ValueError(
            f"the columns {sorted(names)} are not recognised (none of {known}): say which is which, e.g. "
            "columns={prompt: text, response: null}"
        )
    return Columns(prompt=prompt, input=_first(INPUT, names), response=_first(RESPONSE, names), system=system)


def read_messages(row: Mapping[str, Any], columns: Columns) -> tuple[Message, ...]:
    """The messages of one row.

    Raises ValueError for a column that the row lacks, an empty list, a role that is not known or content that is no
    text, and for tool definitions, which would not reach the chat template.
    """
    missing = [name for field in fields(columns) if (name := getattr(columns, field.name)) and name not in row]
    if missing:
        raise ValueError(f"columns: the row has no {', '.join(map(repr, missing))}, only {sorted(row)}")
    if row.get("tools"):
        raise ValueError("'tools' holds definitions that would be lost: write them into the system message's content")
    if columns.messages is not None:
        messages = _turns(row[columns.messages], role="user", name=columns.messages, text_allowed=False)
    else:
        assert columns.prompt is not None
        prompt = row[columns.prompt]
        if columns.input is not None and row[columns.input]:
            prompt = f"{prompt}\n\n{row[columns.input]}"
        messages = _turns(prompt, role="user", name=columns.prompt)
        if columns.response is not None and row[columns.response] is not None:
            messages += _turns(row[columns.response], role="assistant", name=columns.response)
    system = row[columns.system] if columns.system is not None else None
    if system and messages[0]["role"] != "system":
        messages = [_message({"role": "system", "content": system}, 0), *messages]
    return tuple(messages)


def _first(wanted: Sequence[str], names: Collection[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _turns(value: Any, *, role: str, name: str, text_allowed: bool = True) -> list[Message]:
    if isinstance(value, str) and text_allowed:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        kind = "text or a non-empty list" if text_allowed else "a non-empty list"
        raise ValueError(f"{name!r} must be {kind} of messages, not {value!r:.80}")
    return [_message(message, index) for index, message in enumerate(value)]


def _message(message: Any, index: int) -> Message:
    """One message with ``role`` and ``content``, without the fields that are null (Arrow fills absent ones with it)."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {index} must be an object with 'role' and 'content', not {message!r:.80}")
    kept = {name: value for name, value in message.items() if value is not None}
    if "from" in kept and "role" not in kept:
        role = SHAREGPT_ROLES.get(kept.pop("from"))
        if role is None:
            raise ValueError(f"message {index}: 'from' is {message['from']!r}, not one of {', '.join(SHAREGPT_ROLES)}")
        kept = {"role": role, "content": kept.pop("value", None), **kept}
    if kept.get("tool_calls"):
        kept.setdefault("content", "")
    for name in ("role", "content"):
        if not isinstance(kept.get(name), str):
            raise ValueError(f"message {index}: {name!r} must be a string, not {kept.get(name)!r:.80}")
    return kept
