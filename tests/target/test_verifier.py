"""The cached forward and its rollback against one uncached forward; and the targets that cannot roll back."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_model
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig

from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.verifier import refuse_recurrent


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_sliding", "qwen3_next"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTarget:
    folder = save_model(tmp_path_factory.mktemp(request.param), request.param)
    return HuggingFaceTarget(
        name="toy", model=str(folder), home=folder / "home", layer_ids=[1, 4], dtype="float32", device="cpu"
    )


def test_verify_steps_with_rollback_equal_one_full_forward(target: HuggingFaceTarget) -> None:
    """Prefill 10 tokens (beyond the sliding window of 4), then steps of 5 of which 1 to 4 tokens are wrong."""
    ids = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1))
    full = AutoModelForCausalLM.from_pretrained(target.resolved.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = full(ids[None], output_hidden_states=True)
    verifier = target.verifier()
    prefill = verifier.forward(ids[:10])
    logits, states, last = [prefill.logits], [prefill.hidden_states], [prefill.last_hidden_state]
    known, step = 10, 0
    while known < 40:
        good = min(1 + step % 4, 40 - known)
        wrong = (ids[known + good : known + 5] + 1) % 250
        output = verifier.forward(torch.cat([ids[known : known + good], wrong]))
        verifier.rollback(wrong.numel())
        logits.append(output.logits[:good])
        states.append(output.hidden_states[:good])
        last.append(output.last_hidden_state[:good])
        known, step = known + good, step + 1
    assert torch.allclose(torch.cat(logits), expected.logits[0], rtol=1e-4, atol=1e-4)
    wanted = torch.stack([expected.hidden_states[1][0], expected.hidden_states[4][0]], dim=1)
    assert torch.allclose(torch.cat(states), wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(full.model.norm(torch.cat(last)), expected.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


def test_verifiers_do_not_share_a_cache(target: HuggingFaceTarget) -> None:
    one, other = target.verifier(), target.verifier()
    first = one.forward(torch.tensor([1, 2, 3]))
    assert torch.allclose(other.forward(torch.tensor([1, 2, 3])).logits, first.logits)
    one.rollback(0)
    assert one.num_tokens == 3


def test_rollback_of_more_than_the_cache_holds_is_refused(target: HuggingFaceTarget) -> None:
    verifier = target.verifier()
    verifier.forward(torch.tensor([1, 2, 3]))
    for num_tokens in (4, -1):
        with pytest.raises(ValueError, match=rf"rollback of {num_tokens} tokens; the cache holds 3"):
            verifier.rollback(num_tokens)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1), r"'mamba'.*layer kind"),
        (
            Lfm2Config(vocab_size=20, hidden_size=8, num_hidden_layers=2, layer_types=["full_attention", "conv"]),
            r"'lfm2'.*layer kind 'conv'",
        ),
    ],
)
def test_a_target_whose_cache_cannot_roll_back_is_refused(
    config: MambaConfig | Lfm2Config, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message + ".*evaluate.mode=replay"):
        refuse_recurrent(config)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # refused before anybody reads weights
    target = HuggingFaceTarget(name="recurrent", model=str(tmp_path), home=tmp_path / "home")
    with pytest.raises(ValueError, match="cannot roll back"):
        target.verifier()
