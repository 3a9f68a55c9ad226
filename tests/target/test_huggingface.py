"""The in-process target against transformers itself: states, heads, answers; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import END, NUM_ROWS, PAD, save_model
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from dspark_lab.records import Conversation, Sampling, TokenizedConversation
from dspark_lab.target.huggingface import HuggingFaceTarget, batches_by_length

QUESTIONS = ["2 + 2?", "Name a colour, please.", "Hi", "What is the tallest mountain?", "Count down"]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def build(folder: Path, **changes: Any) -> HuggingFaceTarget:
    return HuggingFaceTarget(
        **{"name": "toy", "model": str(folder), "home": folder / "home", "dtype": "float32", "device": "cpu"} | changes
    )


def reference(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    return model.eval()


def prompts() -> list[Conversation]:
    return [Conversation(f"p{i}", ({"role": "user", "content": text},)) for i, text in enumerate(QUESTIONS)]


def conversations(*lengths: int) -> list[TokenizedConversation]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 250, (length,), generator=generator) for length in lengths]
    return [TokenizedConversation(f"c{i}", row, torch.ones_like(row, dtype=torch.bool)) for i, row in enumerate(rows)]


# --- the spec --------------------------------------------------------------------------------------------------------


def test_spec_and_tokenizer_need_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "qwen3")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    target = build(tmp_path)
    spec = target.spec
    assert len(target.tokenizer) == 259
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.head_dim) == (32, 8, NUM_ROWS, 8)
    assert spec.layer_ids == (2, 4, 5)  # [2, n//2, n-3]
    assert spec.mask_token_id == 259  # the first row that the tokenizer does not use
    assert spec.eos_token_ids == (END,)
    assert spec.architecture == "Qwen3ForCausalLM"
    target.head()  # nor does the head
    with pytest.raises(AssertionError, match="weights were loaded"):
        target.capture(conversations(3))  # it is ready when this returns


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [7, END]}))
    assert build(tmp_path).spec.eos_token_ids == (7, END)


@pytest.mark.parametrize("layer_ids", [(0, 8), (-1, 2), (2, 2, 5), (5, 2), ()])
def test_layer_ids_out_of_range_or_order_are_refused(folder: Path, layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"target\.layer_ids=.*(within 0\.\.7|strictly increasing)"):
        build(folder, layer_ids=layer_ids).spec  # noqa: B018


def test_default_layer_ids_need_a_deep_enough_target(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"default .*needs a deeper target than 4 layers"):
        build(tmp_path).spec  # noqa: B018
    assert build(tmp_path, layer_ids=[0, 3]).spec.layer_ids == (0, 3)


@pytest.mark.parametrize(
    ("mask_token_id", "message"),
    [(NUM_ROWS, "outside the embedding"), (-1, "outside the embedding"), (PAD, "pad token"), (END, "eos token")],
)
def test_unusable_mask_token_ids_are_refused(folder: Path, mask_token_id: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"target\.mask_token_id={mask_token_id}.*{message}"):
        build(folder, mask_token_id=mask_token_id).spec  # noqa: B018


def test_without_a_spare_row_the_mask_token_must_be_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", vocab_size=259)
    with pytest.raises(ValueError, match=r"target\.mask_token_id is not given.*no spare row"):
        build(tmp_path).spec  # noqa: B018
    assert build(tmp_path, mask_token_id=16).spec.mask_token_id == 16


def test_constructor_refuses_wrong_types(folder: Path) -> None:
    with pytest.raises(ValueError, match="batch_tokens"):
        build(folder, batch_tokens="many")
    with pytest.raises(ValueError, match="dtype"):
        build(folder, dtype="float16")


# --- the head --------------------------------------------------------------------------------------------------------


def test_head_read_from_files_equals_the_model_and_ties_are_kept(folder: Path) -> None:
    model = reference(folder)
    target = build(folder)
    read = target.head()
    assert "model" not in vars(target)
    target.model  # noqa: B018
    borrowed = target.head()
    tied = model.config.tie_word_embeddings
    for head in (read, borrowed):
        assert torch.equal(head.embedding, model.get_input_embeddings().weight)
        assert torch.equal(head.lm_head, model.get_output_embeddings().weight)
        assert torch.equal(head.norm_weight, model.model.norm.weight)
        assert (head.lm_head is head.embedding) == tied
    assert borrowed.embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        assert torch.allclose(read.embed(ids), output.hidden_states[0])
        sample = dict(target.capture([TokenizedConversation("a", ids[0], ids[0] >= 0)])).popitem()[1]
        assert torch.allclose(read.logits(sample.last_hidden_state), output.logits[0], rtol=1e-4, atol=1e-4)


def test_a_target_with_other_logits_than_norm_and_head_is_refused(tmp_path: Path) -> None:
    from transformers import GemmaConfig

    from dspark_lab.target.anatomy import read_head

    with pytest.raises(ValueError, match=r"type gemma: its logits are not lm_head\(rms_norm\(state\)\).*GemmaRMSNorm"):
        read_head(tmp_path, GemmaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20), dtype=torch.float32)


# --- capture ---------------------------------------------------------------------------------------------------------


def test_capture_equals_transformers_hidden_states(folder: Path) -> None:
    """Id i is hidden_states[i]; the last state is the one that the final norm turns into transformers' last entry."""
    model = reference(folder)
    layer_ids = (0, 3, 7)
    target = build(folder, layer_ids=layer_ids, batch_tokens=40)
    samples = conversations(5, 17, 1, 9, 12, 17)
    captured = dict(target.capture(samples))
    assert set(captured) == {conversation.key for conversation in samples}
    for conversation in samples:
        sample = captured[conversation.key]
        with torch.no_grad():
            expected = model(conversation.token_ids[None], output_hidden_states=True).hidden_states
            normed = model.model.norm(sample.last_hidden_state)
        assert torch.equal(sample.token_ids, conversation.token_ids)
        assert sample.hidden_states.shape == (len(conversation), 3, 32)
        for index, layer_id in enumerate(layer_ids):
            assert torch.allclose(sample.hidden_states[:, index], expected[layer_id][0], rtol=1e-4, atol=1e-4)
        assert torch.allclose(normed, expected[-1][0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(sample.last_hidden_state, expected[-1][0], atol=1e-2)  # it is not normed


def test_captured_tensors_own_their_memory_and_serve_training(folder: Path) -> None:
    sample = next(iter(build(folder).capture(conversations(4, 9))))[1]
    assert sample.hidden_states.untyped_storage().nbytes() == 9 * 3 * 32 * 4
    assert sample.last_hidden_state.untyped_storage().nbytes() == 9 * 32 * 4
    weight = torch.ones(32, requires_grad=True)
    (sample.hidden_states * weight).sum().backward()  # an inference tensor would refuse
    assert weight.grad is not None


def test_batches_stay_within_the_token_budget_and_lose_nobody() -> None:
    samples = conversations(30, 3, 5, 5, 2, 8)
    batches = list(batches_by_length(samples, batch_tokens=16))
    assert sorted(len(c) for batch in batches for c in batch) == [2, 3, 5, 5, 8, 30]
    assert [len(c) for c in batches[0]] == [30]  # longer than the budget: alone
    assert all(len(batch[0]) * len(batch) <= 16 for batch in batches[1:])


def test_states_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.6.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"conversation 'c0': .*NaN or infinite"):
        list(build(tmp_path).capture(conversations(4)))


def test_a_conversation_longer_than_the_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'c1' needs 257 tokens; the target toy has 256 positions"):
        list(build(folder).capture(conversations(4, 257)))


# --- regenerate ------------------------------------------------------------------------------------------------------


def argmax_answer(model: PreTrainedModel, ids: list[int], *, max_new_tokens: int) -> tuple[int, ...]:
    answer: list[int] = []
    while len(answer) < max_new_tokens and END not in answer:
        with torch.no_grad():
            answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return tuple(answer)


def test_greedy_answers_equal_a_plain_argmax_loop(folder: Path) -> None:
    model = reference(folder)
    target = build(folder, batch_size=2)
    answers = list(target.regenerate(prompts(), sampling=Sampling(max_new_tokens=12)))
    assert {answer.id for answer in answers} == {prompt.id for prompt in prompts()}
    for answer in answers:
        ids = target.tokenizer.apply_chat_template(list(answer.messages), add_generation_prompt=True, return_dict=False)
        assert answer.answer_token_ids == argmax_answer(model, list(ids), max_new_tokens=12)
        assert answer.finish == ("stop" if answer.answer_token_ids[-1] == END else "length")
        assert answer.sampling == Sampling(max_new_tokens=12)
    assert len({answer.answer_token_ids for answer in answers}) > 1


def test_answers_stop_with_the_end_token_inside(folder: Path) -> None:
    target = build(folder)
    with torch.no_grad():
        head = target.model.get_output_embeddings()
        bias = torch.nn.Parameter(torch.zeros(NUM_ROWS))
        bias[END] = 1e6
        head.bias = bias
    answers = list(target.regenerate(prompts()[:2], sampling=Sampling(max_new_tokens=5)))
    assert [(answer.answer_token_ids, answer.finish) for answer in answers] == [((END,), "stop")] * 2


def test_sampled_answers_depend_on_seed_and_prompt_not_on_the_batch(folder: Path) -> None:
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, max_new_tokens=10)

    def answers(some: list[Conversation], **changes: Any) -> dict[str, tuple[int, ...] | None]:
        return {a.id: a.answer_token_ids for a in build(folder, **changes).regenerate(some, sampling=sampling)}

    together = answers(prompts())
    assert together == answers(prompts()[::-1], batch_size=2)
    assert answers(prompts()[1:2]) == {"p1": together["p1"]}
    assert answers(prompts(), seed=1) != together
    greedy = {
        a.id: a.answer_token_ids for a in build(folder).regenerate(prompts(), sampling=Sampling(max_new_tokens=10))
    }
    assert greedy != together


def test_settings_of_the_folder_do_not_leak_into_answers(tmp_path: Path) -> None:
    """Vendors ship top_k, temperature and penalties in generation_config.json."""
    save_model(tmp_path, "qwen3")
    plain = list(build(tmp_path).regenerate(prompts(), sampling=Sampling(max_new_tokens=12)))
    file = tmp_path / "generation_config.json"
    inherited = {"do_sample": True, "top_k": 1, "temperature": 3.0, "repetition_penalty": 5.0, "min_new_tokens": 9}
    file.write_text(json.dumps(json.loads(file.read_text()) | inherited))
    assert list(build(tmp_path).regenerate(prompts(), sampling=Sampling(max_new_tokens=12))) == plain


def test_the_sampled_distribution_is_that_of_the_logits(folder: Path) -> None:
    """First tokens of 600 prompts against softmax(logits / T): total variation within sampling noise."""
    target = build(folder, batch_size=600)
    sampling = Sampling(temperature=0.6, top_k=4, max_new_tokens=1)
    same = [Conversation(f"s{i}", prompts()[0].messages) for i in range(600)]
    drawn = torch.tensor([a.answer_token_ids[0] for a in target.regenerate(same, sampling=sampling)])
    ids = target.tokenizer.apply_chat_template(list(same[0].messages), add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = reference(folder)(torch.tensor([ids])).logits[0, -1] / 0.6
    kept = logits.topk(4)
    expected = torch.zeros(NUM_ROWS).scatter_(0, kept.indices, kept.values.softmax(0))
    observed = torch.bincount(drawn, minlength=NUM_ROWS) / 600
    assert 0.5 * (expected - observed).abs().sum() < 0.06


def test_a_prompt_without_room_for_its_answer_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'p0' needs .* tokens; the target toy has 256 positions"):
        list(build(folder).regenerate(prompts()[:1], sampling=Sampling(max_new_tokens=250)))


def test_a_target_without_chat_template_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        list(build(tmp_path).regenerate(prompts(), sampling=Sampling()))
