"""Chat templates of the published formats, written for these tests, and tokenizers whose every token is readable."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The rules of Qwen3's template that matter here: thinking survives only after the last user turn, and the last turn
# always has a thinking block.
QWEN3 = (
    "{% set ns = namespace(last_query=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% set thought = message.reasoning_content if message.reasoning_content is string else '' %}"
    "{% if loop.index0 > ns.last_query and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + message.content.lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SPECIAL = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    GEMMA: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    PLAIN: ["</s>"],
}
WORDS = ["user", "assistant", "model", "system", "hi", "there", "what", "is", "it", "yes", "no", "hmm", "a", "b", ":"]
THINKING = ["<think>", "</think>"]


def words_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per word and per newline; the formats' markers are special tokens, thinking tags are not."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "\n", *WORDS, *THINKING])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    newline = pre_tokenizers.Split(pattern="\n", behavior="isolated")
    colon = pre_tokenizers.Split(pattern=":", behavior="isolated")
    space = pre_tokenizers.Split(pattern=" ", behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([newline, colon, space])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL.get(template, [])})
    tokenizer.chat_template = template
    return tokenizer


def text_tokenizer(template: str, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per byte and per special token: decoding any ids gives back the exact text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer
