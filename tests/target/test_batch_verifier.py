"""The batched cached forward, with sequences of unlike lengths and drafts, against uncached forwards of each."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from dspark_lab.target.huggingface import HuggingFaceTarget


def target_of(kind: str, folder: Path) -> HuggingFaceTarget:
    saved = save_model(folder, kind)
    return HuggingFaceTarget(
        name="toy", model=str(saved), home=folder / "home", layer_ids=[1, 4], dtype="float32", device="cpu"
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_every_sequence_is_as_if_alone(kind: str, tmp_path: Path) -> None:
    """Three prompts; steps of up to 5 tokens of which some are wrong; the second sequence leaves half-way."""
    target = target_of(kind, tmp_path)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 250, (60,), generator=generator) for _ in range(3)]
    model = AutoModelForCausalLM.from_pretrained(target.resolved.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(text[None], output_hidden_states=True) for text in texts]
    verifier = target.batch_verifier()
    known, rows = [4, 11, 7], [0, 1, 2]
    fed = [text[:length] for text, length in zip(texts, known, strict=True)]
    kept, first = list(known), [0, 0, 0]
    for step in range(9):
        lengths = torch.tensor([len(tokens) for tokens in fed])
        output = verifier.forward(pad_sequence(fed, batch_first=True), lengths)
        for place, row in enumerate(rows):
            here = slice(first[row], first[row] + kept[row])
            ours = slice(0, kept[row])
            torch.testing.assert_close(output.logits[place, ours], expected[row].logits[0, here], rtol=1e-4, atol=1e-4)
            wanted = torch.stack([expected[row].hidden_states[layer][0, here] for layer in (1, 4)], dim=1)
            torch.testing.assert_close(output.hidden_states[place, ours], wanted, rtol=1e-4, atol=1e-4)
        verifier.keep(torch.tensor([kept[row] for row in rows]))
        known = [first[row] + kept[row] for row in range(3)]
        if step == 4:
            verifier.select(torch.tensor([0, 2]))
            rows = [0, 2]
        fed = []
        for row in rows:
            first[row], kept[row] = known[row], 1 + (row + step) % 3
            wrong = (texts[row][known[row] + kept[row] :][: (step + row) % 4] + 1) % 250
            fed.append(torch.cat([texts[row][known[row] : known[row] + kept[row]], wrong]))
    assert verifier.used is not None
    assert verifier.used.sum(1).tolist() == [known[0], known[2]]
    assert verifier.cache.get_seq_length() == verifier.used.shape[1]


def test_alone_no_column_is_wasted(tmp_path: Path) -> None:
    verifier = target_of("llama", tmp_path).batch_verifier()
    verifier.forward(torch.arange(8)[None], torch.tensor([8]))
    verifier.keep(torch.tensor([3]))
    assert verifier.cache.get_seq_length() == 3


def test_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding windows"):
        target_of("qwen3_sliding", tmp_path).batch_verifier()


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recurrent layers cannot be decoded in batches here: decode one sequence"):
        target_of("qwen3_next", tmp_path).batch_verifier()
