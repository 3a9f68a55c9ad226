"""The shipped tiny target: small, self-consistent, and fluent in the dialogues that it was trained on."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import dspark_lab
from dspark_lab.data.dialogues import Dialogues, dialogue
from dspark_lab.records import Conversation
from dspark_lab.target.chat import tokenize, tokenize_prompt

FOLDER = Path(dspark_lab.__file__).parent / "assets" / "tiny"
CONFIG = Path(__file__).parents[2] / "conf" / "target" / "tiny.yaml"
MAX_ANSWER_TOKENS = 120
WEATHER = (
    {"role": "system", "content": "You are a careful teacher."},
    {"role": "user", "content": "Is 3 + 4 seven?\n"},
    {"role": "assistant", "content": "\n Yes:\n3 + 4 = 7", "reasoning_content": "I add 4 to 3."},
    {"role": "user", "content": "And déjà vu?"},
    {"role": "assistant", "content": "That is not a number."},
    {"role": "user", "content": "Then 1234."},
    {"role": "assistant", "content": "1234", "reasoning_content": "Four digits.\n\nCopy them."},
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    drawn = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)  # type: ignore[operator]
    return drawn[0, len(prompt) :].tolist()


def test_it_is_small(model: PreTrainedModel) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4 * 2**20


def test_its_group_says_what_its_files_say(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    group, config = yaml.safe_load(CONFIG.read_text()), model.config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    for key in (*sizes, "max_position_embeddings"):
        assert group[key] == getattr(config, key), key
    assert group["num_layers"] == config.num_hidden_layers
    assert group["mask_token_id"] == tokenizer.convert_tokens_to_ids("<|mask|>")
    assert len(tokenizer) == config.vocab_size
    assert max(group["layer_ids"]) < config.num_hidden_layers


def test_it_has_the_shape_that_tests_need(model: PreTrainedModel) -> None:
    config = model.config
    assert config.model_type == "qwen3" and config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.head_dim in (32, 64)


def test_special_tokens_are_distinct_and_end_the_turn(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id  # type: ignore[union-attr]
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id}) == 3


@pytest.mark.parametrize(
    "text", ["a\n\n b\t c", "12 + 345 = 357.", "déjà vu — 数学 🙂", "  two  spaces ", "x**2\r\n'q'"]
)
def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(token_ids) == text


def test_digits_and_newlines_stand_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer("2026\n\n\n", add_special_tokens=False)["input_ids"]) == 7
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not any(character.isdigit() or character == "Ċ" for character in token), token


def test_every_prefix_of_the_messages_renders_to_a_prefix_of_the_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = tokenize(Conversation("weather", WEATHER), tokenizer)
    supervised = []
    for place, message in enumerate(WEATHER):
        if message["role"] != "assistant":
            continue
        start = len(tokenize_prompt(WEATHER[:place], tokenizer))
        written = tokenize(Conversation("cut", WEATHER[: place + 1]), tokenizer).token_ids
        assert tokenize_prompt(WEATHER[:place], tokenizer) == whole.token_ids[:start].tolist()
        assert written.tolist() == whole.token_ids[: len(written)].tolist()
        supervised.append(tokenizer.decode(whole.token_ids[start : len(written) - 1]))
    assert supervised == [
        "<think>\nI add 4 to 3.\n</think>\n\n\n Yes:\n3 + 4 = 7<|im_end|>",
        "That is not a number.<|im_end|>",
        "<think>\nFour digits.\n\nCopy them.\n</think>\n\n1234<|im_end|>",
    ]
    assert tokenizer.decode(whole.token_ids[whole.loss_mask]) == "".join(supervised)


def test_an_unknown_role_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="not tool"):
        tokenize_prompt([{"role": "tool", "content": "42"}], tokenizer)


def test_dialogues_never_use_the_mask_row_and_few_bytes_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    used: set[int] = set()
    for index in range(300):
        conversation = tokenize(dialogue(seed=5, index=index), tokenizer)
        assert conversation.loss_mask.any()
        used.update(conversation.token_ids.tolist())
    assert tokenizer.mask_token_id not in used
    assert len(used) > 350  # enough of the vocabulary for a draft vocabulary to matter


def test_greedy_answers_end_by_themselves_and_are_plain_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    special = set(tokenizer.all_special_ids)
    answers = []
    for prompt in Dialogues(num_prompts=8, seed=11):
        answer = greedy(model, tokenize_prompt(prompt.messages, tokenizer))
        assert answer[-1] == tokenizer.eos_token_id, tokenizer.decode(answer)
        assert not special & set(answer[:-1]), tokenizer.decode(answer)
        answers.append(answer)
    assert 15 < sum(map(len, answers)) / len(answers) < 80
    assert len({tuple(answer) for answer in answers}) == len(answers)


def test_answers_depend_on_the_prompt_and_follow_its_template(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """It is made to be drafted for: its answers take the form that the question asks for, right or wrong."""
    asked = {
        "Sort from small to large: 9, 4, 7.": "From small to large",
        "Repeat these words: river, stone, apple.": "The words are",
        "Please count forward from 28 to 42 in steps of 2.": "",
    }
    answers = [
        tokenizer.decode(greedy(model, tokenize_prompt([{"role": "user", "content": q}], tokenizer))) for q in asked
    ]
    assert len(set(answers)) == len(asked)
    assert [a.startswith(start) for a, start in zip(answers, asked.values(), strict=True)] == [True] * 3, answers
