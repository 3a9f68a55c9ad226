"""The exact text that is supervised, per chat format: what lies between « and » was written by the assistant.

The templates are short ones of our own that follow the formats' public conventions; markers are special tokens.
"""

import json

import pytest
from chat_templates import CHATML, LLAMA3, text_tokenizer

from dspark_lab.records import Conversation, TokenizedConversation
from dspark_lab.target.chat import UnmaskableTurnError, tokenize_turns

CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA_TOKENS = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
KIMI_TOKENS = [
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]

# Thinking, given apart or inside the content, stays only after the last question; the last turn always has a block. Tool
# answers are a user's turn that is no question; several of them share one turn.
QWEN3 = r"""
{%- set ns = namespace(question=0) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.question = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought = m.reasoning_content or '' -%}{%- set said = m.content -%}
    {%- if '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.question and (loop.last or thought) -%}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') -}}
    {%- else -%}{{- said -}}{%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {{- '\n' if said or not loop.first else '' -}}
      {{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' -}}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
  {%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' -}}
{%- endif -%}
"""
# As later thinking-only models: the template opens the thinking block itself.
QWEN3_THINKING = QWEN3.replace("{{- '<|im_start|>assistant\\n' -}}\n  {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking "
                               "is defined and enable_thinking is false else '' -}}",
                               "{{- '<|im_start|>assistant\\n<think>\\n' -}}")  # fmt: skip
# The system's text goes in front of the first question; the assistant is called model; turns must alternate.
GEMMA = r"""
{{- '<bos>' -}}
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if first else messages) -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
  {{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\n' if add_generation_prompt else '' -}}
"""
# No newlines at all; a system turn is put in front where there is none.
KIMI = r"""
{%- macro open(m) -%}
  {{- {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, '<|im_system|>') + m.role + '<|im_middle|>' -}}
{%- endmacro -%}
{%- if messages[0].role != 'system' %}{{ '<|im_system|>system<|im_middle|>Be helpful.<|im_end|>' }}{% endif -%}
{%- for m in messages -%}
  {{- open(m) + (THOUGHT) + m.content -}}
  {%- if m.tool_calls -%}
    {{- '<|tool_calls_section_begin|>' -}}
    {%- for call in m.tool_calls -%}
      {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
      {{- call.function.arguments | tojson + '<|tool_call_end|>' -}}
    {%- endfor -%}
    {{- '<|tool_calls_section_end|>' -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' -}}
"""
# The thinking kind empties the block of every turn up to the last final answer, that one included.
KIMI_THINKING = (
    "{%- set ns = namespace(final=-1) -%}"
    "{%- for m in messages if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = messages.index(m) %}"
    "{% endfor -%}"
) + KIMI.replace(
    "(THOUGHT)",
    "('<think>' + ((m.reasoning_content or '') if loop.index0 > ns.final else '') + '</think>' "
    "if m.role == 'assistant' else '')",
)
KIMI = KIMI.replace("(THOUGHT)", "''")

FORMATS = {
    "chatml": (CHATML, CHATML_TOKENS),
    "qwen3": (QWEN3, CHATML_TOKENS),
    "qwen3_thinking": (QWEN3_THINKING, CHATML_TOKENS),
    "llama3": (LLAMA3, LLAMA3_TOKENS),
    "gemma": (GEMMA, GEMMA_TOKENS),
    "kimi": (KIMI, KIMI_TOKENS),
    "kimi_thinking": (KIMI_THINKING, KIMI_TOKENS),
}
ADD = {"id": "add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CALL_JSON = json.dumps(ADD["function"])


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, *calls: dict, thought: str | None = None) -> dict:
    message = {"role": "assistant", "content": content}
    return (
        message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": list(calls)} if calls else {})
    )


SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"role": "tool", "content": "5"}
TWO_TURNS = (SYSTEM, user("Hi"), assistant("Hello!"), user("2 + 3?"), assistant("It is 5."))
THOUGHTFUL = (user("Hi"), assistant("Hello!", thought="Greet."), user("2 + 3?"), assistant("5.", thought="Easy."))
WITH_TOOL = (user("2 + 3?"), assistant("", ADD), TOOL, assistant("It is 5."))
THOUGHTFUL_WITH_TOOL = (
    *(user("2 + 3?"), assistant("", ADD, thought="Use add."), TOOL),
    assistant("It is 5.", thought="Say it."),
)


def im(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}\n"


def header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def kimi(role: str, text: str) -> str:
    kind = {"user": "user", "assistant": "assistant"}.get(role, "system")
    return f"<|im_{kind}|>{role}<|im_middle|>{text}"


HI, SUM = im("user", "Hi<|im_end|>"), im("user", "2 + 3?<|im_end|>")
EMPTY = "<think>\n\n</think>\n\n"
RESULT = im("user", "<tool_response>\n5\n</tool_response><|im_end|>")
KIMI_SYSTEM = kimi("system", "Be helpful.<|im_end|>")
KIMI_HI, KIMI_SUM = kimi("user", "Hi<|im_end|>"), kimi("user", "2 + 3?<|im_end|>")
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>add:0<|tool_call_argument_begin|>"
    '{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>'
)

# format, messages, enable_thinking, the samples
CASES = {
    "chatml, two turns: one sample": (
        "chatml", TWO_TURNS, None,
        [im("system", "Be brief.<|im_end|>") + HI + im("assistant", "«Hello!<|im_end|>»") + SUM
         + im("assistant", "«It is 5.<|im_end|>»")],
    ),
    "qwen3, thinking off: the template's empty block is never supervised and is not in the history": (
        "qwen3", TWO_TURNS, False,
        [im("system", "Be brief.<|im_end|>") + HI + im("assistant", f"{EMPTY}«Hello!<|im_end|>»"),
         im("system", "Be brief.<|im_end|>") + HI + im("assistant", "Hello!<|im_end|>") + SUM
         + im("assistant", f"{EMPTY}«It is 5.<|im_end|>»")],
    ),
    "qwen3, thinking on: each turn's own thoughts are supervised, earlier ones are gone": (
        "qwen3", THOUGHTFUL, True,
        [HI + im("assistant", "«<think>\nGreet.\n</think>\n\nHello!<|im_end|>»"),
         HI + im("assistant", "Hello!<|im_end|>") + SUM
         + im("assistant", "«<think>\nEasy.\n</think>\n\n5.<|im_end|>»")],
    ),
    "qwen3, thoughts inside the content are treated alike": (
        "qwen3", (user("Hi"), assistant("<think>\nGreet.\n</think>\n\nHello!"), user("2 + 3?"), assistant("5.")), True,
        [HI + im("assistant", "«<think>\nGreet.\n</think>\n\nHello!<|im_end|>»"),
         HI + im("assistant", "Hello!<|im_end|>") + SUM + im("assistant", f"«{EMPTY}5.<|im_end|>»")],
    ),
    "qwen3, tools with thoughts: one sample, since a tool's answer is no new question": (
        "qwen3", THOUGHTFUL_WITH_TOOL, None,
        [SUM + im("assistant", f"«<think>\nUse add.\n</think>\n\n<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>»")
         + RESULT + im("assistant", "«<think>\nSay it.\n</think>\n\nIt is 5.<|im_end|>»")],
    ),
    "qwen3, tools without thinking: the call is supervised, the tool's answer is not": (
        "qwen3", WITH_TOOL, False,
        [SUM + im("assistant", f"{EMPTY}«<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>»"),
         SUM + im("assistant", f"<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>") + RESULT
         + im("assistant", f"{EMPTY}«It is 5.<|im_end|>»")],
    ),
    "qwen3, two calls and two results": (
        "qwen3", (user("2 + 3?"), assistant("Let me see.", ADD, ADD, thought="Twice."), TOOL, TOOL,
                  assistant("5.", thought="Good.")), None,
        [SUM + im("assistant", "«<think>\nTwice.\n</think>\n\nLet me see."
                  + f"\n<tool_call>\n{CALL_JSON}\n</tool_call>" * 2 + "<|im_end|>»")
         + im("user", "<tool_response>\n5\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>")
         + im("assistant", "«<think>\nGood.\n</think>\n\n5.<|im_end|>»")],
    ),
    "a template that opens the thinking block: the opening tag is not the assistant's": (
        "qwen3_thinking", THOUGHTFUL, None,
        [HI + im("assistant", "<think>\n«Greet.\n</think>\n\nHello!<|im_end|>»"),
         HI + im("assistant", "Hello!<|im_end|>") + SUM
         + im("assistant", "<think>\n«Easy.\n</think>\n\n5.<|im_end|>»")],
    ),
    "llama3, two turns": (
        "llama3", TWO_TURNS, None,
        ["<|begin_of_text|>" + header("system") + "Be brief.<|eot_id|>" + header("user") + "Hi<|eot_id|>"
         + header("assistant") + "«Hello!<|eot_id|>»" + header("user") + "2 + 3?<|eot_id|>"
         + header("assistant") + "«It is 5.<|eot_id|>»"],
    ),
    "gemma, two turns": (
        "gemma", TWO_TURNS, None,
        ["<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n«Hello!<end_of_turn>»\n"
         "<start_of_turn>user\n2 + 3?<end_of_turn>\n<start_of_turn>model\n«It is 5.<end_of_turn>»\n"],
    ),
    "kimi, two turns": (
        "kimi", TWO_TURNS, None,
        [kimi("system", "Be brief.<|im_end|>") + KIMI_HI + kimi("assistant", "«Hello!<|im_end|>»") + KIMI_SUM
         + kimi("assistant", "«It is 5.<|im_end|>»")],
    ),
    "kimi, tools: the call is supervised with its markers": (
        "kimi", WITH_TOOL, None,
        [KIMI_SYSTEM + KIMI_SUM + kimi("assistant", f"«{KIMI_CALL}<|im_end|>»") + kimi("tool", "5<|im_end|>")
         + kimi("assistant", "«It is 5.<|im_end|>»")],
    ),
    "kimi with thinking: the empty block is the assistant's": (
        "kimi_thinking", TWO_TURNS, None,
        [kimi("system", "Be brief.<|im_end|>") + KIMI_HI + kimi("assistant", "«<think></think>Hello!<|im_end|>»")
         + KIMI_SUM + kimi("assistant", "«<think></think>It is 5.<|im_end|>»")],
    ),
    "kimi with thinking: thoughts before a call that no final answer follows": (
        "kimi_thinking", THOUGHTFUL_WITH_TOOL[:3], None,
        [KIMI_SYSTEM + KIMI_SUM + kimi("assistant", f"«<think>Use add.</think>{KIMI_CALL}<|im_end|>»")
         + kimi("tool", "5<|im_end|>")],
    ),
}  # fmt: skip


def marked(sample: TokenizedConversation, tokenizer) -> str:
    text, supervised = "", False
    for token, mask in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        text += "" if mask == supervised else "«" if mask else "»"
        text += tokenizer.decode([token])
        supervised = mask
    return text + ("»" if supervised else "")


@pytest.mark.parametrize("case", CASES)
def test_golden_mask(case: str) -> None:
    format_name, messages, enable_thinking, expected = CASES[case]
    tokenizer = text_tokenizer(*FORMATS[format_name])
    conversation = Conversation("c", messages, source="part")
    samples = tokenize_turns(conversation, tokenizer, enable_thinking=enable_thinking)
    assert [marked(sample, tokenizer) for sample in samples] == expected
    assert {sample.source for sample in samples} == {"part"}


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (THOUGHTFUL, "turn 1: the template drops this turn's reasoning_content; regenerate the answer"),
        (THOUGHTFUL_WITH_TOOL, "turn 3: the template's generation prompt is not a prefix .*; regenerate the answers"),
    ],
)
def test_thoughts_that_a_template_drops_even_from_the_turn_at_hand_are_refused(messages, complaint) -> None:
    """Such a template cannot say what the assistant wrote; regenerated answers are ids and need no template."""
    tokenizer = text_tokenizer(*FORMATS["kimi_thinking"])
    with pytest.raises(UnmaskableTurnError, match=complaint):
        tokenize_turns(Conversation("c", messages), tokenizer)
    answer = tuple(tokenizer("<think>Easy.</think>5.<|im_end|>", add_special_tokens=False)["input_ids"])
    (sample,) = tokenize_turns(Conversation("c", messages[:-1], answer_token_ids=answer), tokenizer)
    assert marked(sample, tokenizer).endswith(
        "<|im_assistant|>assistant<|im_middle|>«<think>Easy.</think>5.<|im_end|>»"
    )
