"""Golden ids and masks of the published chat formats, on a tokenizer whose every token is readable."""

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, PLAIN, QWEN3, words_tokenizer
from tokenizers import pre_tokenizers

from dspark_lab.records import Conversation, Sampling
from dspark_lab.target.chat import (
    UnmaskableTurnError,
    one_sample_per_turn,
    template_hash,
    tokenize,
    tokenize_maskable,
    tokenize_prompt,
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None) -> dict[str, str]:
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def conversation(*messages: dict[str, str], **fields) -> Conversation:
    return Conversation(id="c7", messages=messages, **fields)


def marked(tokenized, tokenizer) -> str:
    """The tokens, supervised ones in brackets."""
    tokens = tokenizer.convert_ids_to_tokens(tokenized.token_ids.tolist())
    pairs = zip(tokens, tokenized.loss_mask.tolist(), strict=True)
    return " ".join(f"[{token}]" if mask else token for token, mask in pairs).replace("\n", "\\n")


def test_chatml_supervises_every_assistant_turn_through_its_end_token_but_not_the_newline_after_it():
    tokenizer = words_tokenizer(CHATML)
    tokenized = tokenize(
        conversation(user("hi"), assistant("hi there"), user("what is it"), assistant("yes")), tokenizer
    )
    assert marked(tokenized, tokenizer) == (
        "<|im_start|> user \\n hi <|im_end|> \\n <|im_start|> assistant \\n [hi] [there] [<|im_end|>] \\n "
        "<|im_start|> user \\n what is it <|im_end|> \\n <|im_start|> assistant \\n [yes] [<|im_end|>] \\n"
    )


def test_llama3_begins_with_the_templates_own_bos_only():
    tokenizer = words_tokenizer(LLAMA3)
    tokenized = tokenize(conversation(user("hi"), assistant("yes"), user("no"), assistant("hmm")), tokenizer)
    header = "<|start_header_id|> {} <|end_header_id|> \\n \\n "
    assert marked(tokenized, tokenizer) == (
        "<|begin_of_text|> "
        + header.format("user")
        + "hi <|eot_id|> "
        + header.format("assistant")
        + "[yes] [<|eot_id|>] "
        + header.format("user")
        + "no <|eot_id|> "
        + header.format("assistant")
        + "[hmm] [<|eot_id|>]"
    )


def test_gemma_ends_a_turn_by_a_token_that_is_not_the_tokenizers_eos():
    tokenizer = words_tokenizer(GEMMA)
    assert tokenizer.eos_token_id is None
    tokenized = tokenize(conversation(user("hi"), assistant("yes")), tokenizer)
    assert marked(tokenized, tokenizer) == (
        "<bos> <start_of_turn> user \\n hi <end_of_turn> \\n <start_of_turn> model \\n [yes] [<end_of_turn>] \\n"
    )


def test_an_empty_answer_still_supervises_the_end_of_turn():
    tokenizer = words_tokenizer(CHATML)
    tokenized = tokenize(conversation(user("hi"), assistant("")), tokenizer)
    assert marked(tokenized, tokenizer).endswith("assistant \\n [<|im_end|>] \\n")


def test_a_template_without_end_token_supervises_the_content_alone():
    tokenizer = words_tokenizer(PLAIN)
    tokenized = tokenize(conversation(user("hi"), assistant("yes no"), user("a"), assistant("b")), tokenizer)
    assert marked(tokenized, tokenizer) == "user : hi \\n assistant : [yes] [no] \\n user : a \\n assistant : [b] \\n"


def test_qwen3_thinking_is_supervised_when_the_assistant_wrote_it():
    tokenizer = words_tokenizer(QWEN3)
    tokenized = tokenize(conversation(user("hi"), assistant("yes", "hmm")), tokenizer)
    assert marked(tokenized, tokenizer) == (
        "<|im_start|> user \\n hi <|im_end|> \\n <|im_start|> assistant \\n "
        "[<think>] [\\n] [hmm] [\\n] [</think>] [\\n] [\\n] [yes] [<|im_end|>] \\n"
    )


def test_qwen3_without_thinking_leaves_the_templates_empty_block_unsupervised():
    tokenizer = words_tokenizer(QWEN3)
    tokenized = tokenize(conversation(user("hi"), assistant("yes")), tokenizer, enable_thinking=False)
    assert marked(tokenized, tokenizer).endswith(
        "assistant \\n <think> \\n \\n </think> \\n \\n [yes] [<|im_end|>] \\n"
    )


def test_thinking_dropped_from_history_is_refused_by_turn_and_one_sample_per_turn_mends_it():
    tokenizer = words_tokenizer(QWEN3)
    chat = conversation(user("hi"), assistant("yes", "hmm"), user("what"), assistant("no", "a"))
    with pytest.raises(UnmaskableTurnError, match=r"'c7', turn 1: .* once later messages follow .* turns='last'"):
        tokenize(chat, tokenizer)
    first, second = (tokenize(cut, tokenizer, turns="last") for cut in one_sample_per_turn(chat))
    assert (first.id, second.id) == ("c7/turn-1", "c7/turn-3")
    assert marked(first, tokenizer).endswith("[hmm] [\\n] [</think>] [\\n] [\\n] [yes] [<|im_end|>] \\n")
    assert marked(second, tokenizer).endswith(
        "assistant \\n yes <|im_end|> \\n <|im_start|> user \\n what <|im_end|> \\n <|im_start|> assistant \\n "
        "[<think>] [\\n] [a] [\\n] [</think>] [\\n] [\\n] [no] [<|im_end|>] \\n"
    )


def test_a_few_conversations_that_cannot_be_masked_are_left_out_with_their_reasons_and_many_stop():
    tokenizer = words_tokenizer(CHATML)
    fine, broken = conversation(user("hi"), assistant("yes")), conversation(assistant("hi"), user("yes"))
    samples, reasons = tokenize_maskable([fine] * 19 + [broken], tokenizer)
    assert len(samples) == 19 and len(reasons) == 1
    assert "turn 0: the conversation begins with the assistant" in reasons[0]
    with pytest.raises(
        ValueError, match=r"2 of 20 conversations cannot be masked .*\(5% may be left out\); the first: "
    ):
        tokenize_maskable([fine] * 18 + [broken] * 2, tokenizer)
    assert tokenize_maskable([], tokenizer) == ([], [])


def test_enable_thinking_that_contradicts_the_answer_is_refused():
    with pytest.raises(UnmaskableTurnError, match="turn 1: the template's generation prompt is not a prefix"):
        tokenize(conversation(user("hi"), assistant("yes", "hmm")), words_tokenizer(QWEN3), enable_thinking=False)


def test_reasoning_that_the_template_would_drop_is_refused():
    with pytest.raises(UnmaskableTurnError, match="turn 1: the template drops this turn's reasoning_content"):
        tokenize(conversation(user("hi"), assistant("yes", "hmm")), words_tokenizer(CHATML))


def test_a_turn_that_does_not_end_like_others_is_refused():
    ends_open = CHATML.replace(
        "message.content + '<|im_end|>'", "message.content + ('<|im_end|>' if 'no' not in message.content else '')"
    )
    tokenizer = words_tokenizer(CHATML)
    tokenizer.chat_template = ends_open
    with pytest.raises(UnmaskableTurnError, match="turn 1: it does not end as the template ends"):
        tokenize(conversation(user("hi"), assistant("no")), tokenizer)


def test_an_assistant_who_speaks_first_is_refused():
    with pytest.raises(UnmaskableTurnError, match="turn 0: the conversation begins with the assistant"):
        tokenize(conversation(assistant("hi"), user("yes")), words_tokenizer(CHATML))


def test_a_regenerated_answer_is_supervised_as_drawn():
    tokenizer = words_tokenizer(CHATML)
    # "hi" "<|im_start|>": ids that no re-tokenisation of text would give; cut by length, so without end of turn.
    answer = tuple(tokenizer.convert_tokens_to_ids(["hi", "<|im_start|>", "there"]))
    sampling = Sampling(temperature=0.7)
    tokenized = tokenize(conversation(user("hi"), answer_token_ids=answer, sampling=sampling, domain="math"), tokenizer)
    assert marked(tokenized, tokenizer) == (
        "<|im_start|> user \\n hi <|im_end|> \\n <|im_start|> assistant \\n [hi] [<|im_start|>] [there]"
    )
    assert tokenized.token_ids.tolist()[: -len(answer)] == tokenize_prompt([user("hi")], tokenizer)
    assert (tokenized.id, tokenized.domain, tokenized.sampling) == ("c7", "math", sampling)


def test_a_conversation_without_assistant_comes_back_unsupervised():
    tokenized = tokenize(conversation(user("hi")), words_tokenizer(CHATML))
    assert len(tokenized) == 6 and not tokenized.loss_mask.any()


def test_prompts_that_are_none_are_refused():
    tokenizer = words_tokenizer(CHATML)
    with pytest.raises(ValueError, match="the last of 2 messages has role 'assistant'"):
        tokenize_prompt([user("hi"), assistant("yes")], tokenizer)
    with pytest.raises(ValueError, match="messages: empty"):
        tokenize_prompt([], tokenizer)


def test_a_tokenizer_without_template_is_refused():
    with pytest.raises(ValueError, match="has no chat template"):
        tokenize(conversation(user("hi"), assistant("yes")), words_tokenizer(None))


def test_roles_that_the_template_refuses_are_named():
    with pytest.raises(ValueError, match=r"refuses the roles \['user', 'user'\]: .*alternate"):
        tokenize_prompt([user("hi"), user("hi")], words_tokenizer(GEMMA))


def test_enable_thinking_that_the_template_does_not_know_is_refused():
    with pytest.raises(ValueError, match="enable_thinking=True cannot take effect"):
        tokenize_prompt([user("hi")], words_tokenizer(CHATML), enable_thinking=True)


def test_the_template_hash_changes_with_template_vocabulary_splitting_and_options_only():
    reference = template_hash(words_tokenizer(CHATML))
    assert template_hash(words_tokenizer(CHATML)) == reference
    padded = words_tokenizer(CHATML)
    padded.add_special_tokens({"pad_token": "<unk>"})
    padded(["hi", "hi there"], padding=True)  # leaves traces in the serialised tokenizer
    unpadded = words_tokenizer(CHATML)
    unpadded.add_special_tokens({"pad_token": "<unk>"})
    assert template_hash(padded) == template_hash(unpadded)

    template, vocabulary, splitting = (words_tokenizer(CHATML) for _ in range(3))
    template.chat_template = CHATML + " "
    vocabulary.add_tokens(["another"])
    splitting.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hashes = [template_hash(tokenizer) for tokenizer in (template, vocabulary, splitting, words_tokenizer(QWEN3))]
    hashes.append(template_hash(words_tokenizer(QWEN3), enable_thinking=False))
    assert len({reference, *hashes}) == 6
