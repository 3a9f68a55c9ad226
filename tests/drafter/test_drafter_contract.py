"""What every drafter must do. A new one is a line in ``tiny_world.DRAFTERS``."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from tiny_world import (
    ALL,
    DRAFTERS,
    SPEC,
    VARIANTS,
    VOCABULARIES,
    assert_close,
    build,
    context_of,
    document,
    documents,
    logits_of,
    loss_of,
    pack,
    propose,
    rows_of,
    tiny_batch,
)
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import dspark_lab
from dspark_lab.decoding.sampling import probabilities
from dspark_lab.drafter.base import Drafter, DraftOutput
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.layers import Rotary, layer_config
from dspark_lab.records import Batch, Sampling, TargetSample

GREEDY, SAMPLED = Sampling(), Sampling(temperature=3.0)
EVERY_DRAFTER = pytest.mark.parametrize("name", [*DRAFTERS, *VARIANTS])
BOTH_VOCABULARIES = pytest.mark.parametrize("vocabulary", VOCABULARIES)

LAYER = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm"]
BLOCK_LAYER = [*LAYER, *NORMS, "self_attn.q_norm", "self_attn.k_norm"]
BLOCK_KEYS = ["fc", "hidden_norm", "norm", *(f"layers.{layer}.{name}" for layer in (0, 1) for name in BLOCK_LAYER)]
CHAIN_KEYS = ["fc", "norm", "layers.0.hidden_norm"]
CHAIN_KEYS += [f"layers.{layer}.{name}" for layer in (0, 1) for name in (*LAYER, *NORMS)]
WEIGHT_NAMES = {  # tables 2.1 and 2.2 of the reference, without embed_tokens and lm_head; others are not prescribed
    "eagle3": {f"{key}.weight" for key in CHAIN_KEYS},
    "dflash": {f"{key}.weight" for key in BLOCK_KEYS},
    "dspark": {f"{key}.weight" for key in BLOCK_KEYS}
    | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    | {"confidence_head.proj.weight", "confidence_head.proj.bias"},
}


def test_every_drafter_of_conf_is_under_contract():
    folder = Path(dspark_lab.__file__).parents[1] / "conf" / "drafter"
    assert {path.stem for path in folder.glob("*.yaml")} == set(DRAFTERS)
    for path in folder.glob("*.yaml"):
        module, _, cls = yaml.safe_load(path.read_text())["_target_"].rpartition(".")
        assert type(build(path.stem)) is getattr(importlib.import_module(module), cls)


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_weights_have_the_names_of_the_speculators_format(name: str, vocabulary: str):
    drafter = build(name, vocabulary=vocabulary)
    state = drafter.state_dict()
    assert set(state) == WEIGHT_NAMES.get(name, set(state))
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    again = build(name, vocabulary=vocabulary)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(state, strict=True)
    batch = tiny_batch()
    assert torch.equal(logits_of(again, again(batch)), logits_of(drafter, drafter(batch)))


@EVERY_DRAFTER
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@BOTH_VOCABULARIES
def test_borrowed_matrices_are_outside_the_module_and_move_with_it(name: str, vocabulary: str, tied: bool):
    drafter = build(name, vocabulary=vocabulary, tied=tied)
    borrowed = drafter.target_head
    storages = {t.data_ptr() for t in (borrowed.embedding, borrowed.norm_weight, borrowed.lm_head, drafter.draft_rows)}
    owned = {t.data_ptr() for t in (*drafter.parameters(), *drafter.buffers())}
    assert not storages & owned
    assert torch.equal(drafter.draft_rows, borrowed.lm_head[VOCABULARIES[vocabulary].draft_to_target])

    drafter.to(torch.float64)
    head = drafter.target_head
    moved = (head.embedding, head.norm_weight, head.lm_head, drafter.draft_rows, *drafter.parameters())
    assert {t.dtype for t in moved} == {torch.float64}
    assert (head.embedding is head.lm_head) == tied
    assert (drafter.draft_rows is head.lm_head) == (vocabulary == "full"), "the full vocabulary needs no copy"
    assert borrowed.embedding.dtype == torch.float32, "the target keeps its own"


@EVERY_DRAFTER
def test_positions_survive_a_cast_to_bf16(name: str):
    """Rotary frequencies rounded to bf16 would be off by radians at position 2000."""
    position = torch.tensor([0, 1, 2000])
    expected = build(name).rotary(position)
    for actual, exact in zip(build(name).to(torch.bfloat16).float().rotary(position), expected, strict=True):
        assert torch.equal(actual.float(), exact)


@EVERY_DRAFTER
def test_a_bf16_drafter_drafts(name: str):
    drafter = build(name).to(torch.bfloat16)
    sample = document("0" * 12, seed=0)
    proposal = propose(drafter, context_of(sample, anchor=9), num_draft_tokens=3, sampling=SAMPLED, generator=seeded())
    assert proposal.probabilities is not None and proposal.probabilities.dtype == torch.float32


@EVERY_DRAFTER
@pytest.mark.parametrize("num_draft_tokens", [-1, 99])
def test_more_draft_tokens_than_trained_for_are_refused(name: str, num_draft_tokens: int):
    drafter = build(name)
    context = context_of(document("0" * 8, seed=0), anchor=5)
    with pytest.raises(ValueError, match=rf"num_draft_tokens={num_draft_tokens}.*at most {drafter.num_draft_tokens}"):
        propose(drafter, context, num_draft_tokens=num_draft_tokens, sampling=GREEDY)
    assert len(context.token_ids) == 5, "a refused proposal consumes nothing"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_training_graph(drafter: Drafter, sample: TargetSample, anchor: int, following: Tensor) -> DraftOutput:
    """The training graph's first block (EAGLE-3: chain) when ``following`` is the text after the anchor."""
    prefix = anchor + 1
    filler = document("0" * (prefix + len(following) + 1), seed=77)  # states from the anchor on, which must not matter
    states = filler.hidden_states.clone()
    states[:anchor] = sample.hidden_states[:anchor]
    text = TargetSample(
        token_ids=torch.cat([sample.token_ids[:prefix], following, following[-1:]]),
        loss_mask=torch.arange(len(filler.token_ids)) >= anchor,
        hidden_states=states,
        last_hidden_state=filler.last_hidden_state,
    )
    before = document("0011", seed=78)
    with torch.no_grad():
        output = drafter(pack([[before, text]], row_tokens=len(text.token_ids) + 6))
    first = 1  # the document before has one anchor; EAGLE-3 needs a state before it, so a chain, too
    return output[first : first + 1]


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_greedy_proposal_is_the_argmax_of_the_training_graph(name: str, vocabulary: str):
    drafter = build(name, vocabulary=vocabulary)
    sample = document("0" * 20, seed=1)
    steps = getattr(drafter, "ttt_steps", drafter.num_draft_tokens)
    for anchor in (1, 4, 15):
        proposal = propose(drafter, context_of(sample, anchor=anchor), num_draft_tokens=steps, sampling=GREEDY)
        assert proposal.probabilities is None
        output = in_training_graph(drafter, sample, anchor, proposal.token_ids)
        logits = logits_of(drafter, output)[0]
        assert proposal.token_ids.tolist() == drafter.vocabulary.to_target(logits.argmax(-1)).tolist()
        assert proposal.top_probability is not None
        assert_close(proposal.top_probability, logits.softmax(-1).amax(-1))


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_forced_proposal_has_the_distributions_of_the_training_graph(name: str, vocabulary: str):
    """Golden tests 6 to 8, with a context that arrives in several pieces, each after a proposal that was rejected."""
    drafter = build(name, vocabulary=vocabulary)
    sample = document("0" * 24, seed=2)
    steps = getattr(drafter, "ttt_steps", drafter.num_draft_tokens)
    context = context_of(sample, anchor=3)
    for anchor in (3, 4, 9, 11, 18):
        known = context.position
        if anchor > known:
            new = slice(known, anchor)
            context.advance(sample.token_ids[new], sample.hidden_states[new], int(sample.token_ids[anchor]))
        forced = sample.token_ids[anchor + 1 : anchor + 1 + steps]
        proposal = propose(drafter, context, num_draft_tokens=steps, sampling=SAMPLED, forced_token_ids=forced)
        assert len(context.token_ids) == len(context.hidden_states) == 0, "propose leaves the new states empty"
        assert torch.equal(proposal.token_ids, forced)
        output = in_training_graph(drafter, sample, anchor, forced)
        q = probabilities(logits_of(drafter, output)[0], SAMPLED)
        assert proposal.probabilities is not None
        assert_close(proposal.probabilities[:, drafter.vocabulary.draft_to_target], q)
        assert proposal.top_probability is not None
        assert_close(proposal.top_probability, q.amax(-1))  # of the slot's distribution, whatever is drawn from it


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_sampled_proposal(name: str, vocabulary: str):
    """Distributions over target ids, nothing outside the draft vocabulary, tokens drawn from them."""
    drafter = build(name, vocabulary=vocabulary)
    sample = document("0" * 12, seed=3)
    count = drafter.num_draft_tokens
    draft_ids = set(VOCABULARIES[vocabulary].draft_to_target.tolist())
    outside = [token for token in range(SPEC.vocab_size) if token not in draft_ids]
    drawn = set()
    for seed in range(8):
        proposal = propose(
            drafter, context_of(sample, anchor=9), num_draft_tokens=count, sampling=SAMPLED, generator=seeded(seed)
        )
        q = proposal.probabilities
        assert q is not None and q.shape == (count, SPEC.vocab_size)
        assert_close(q.sum(-1), torch.ones(count))
        assert (q[:, outside] == 0).all()
        assert (q.gather(1, proposal.token_ids[:, None]) > 0).all()
        drawn.add(tuple(proposal.token_ids.tolist()))
        forced = propose(
            drafter,
            context_of(sample, anchor=9),
            num_draft_tokens=count,
            sampling=SAMPLED,
            forced_token_ids=proposal.token_ids,
        )
        assert forced.probabilities is not None and torch.equal(forced.probabilities, q)
    assert len(drawn) > 4
    cold = Sampling(temperature=3.0, top_k=1)
    coldest = propose(drafter, context_of(sample, anchor=9), num_draft_tokens=count, sampling=cold, generator=seeded())
    greedy = propose(drafter, context_of(sample, anchor=9), num_draft_tokens=count, sampling=GREEDY)
    assert torch.equal(coldest.token_ids, greedy.token_ids)


@EVERY_DRAFTER
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fewer_draft_tokens_are_a_prefix_of_more(name: str, sampling: Sampling):
    drafter = build(name)
    sample = document("0" * 12, seed=4)

    def drafted(count: int, context: DraftContext):
        following = sample.token_ids[:count]
        forced = None if sampling.greedy else following
        return propose(drafter, context, num_draft_tokens=count, sampling=sampling, forced_token_ids=forced)

    full = drafted(drafter.num_draft_tokens, context_of(sample, anchor=7))
    for count in range(drafter.num_draft_tokens):
        context = context_of(sample, anchor=7)
        part = drafted(count, context)
        assert context.position == 7 and len(context.token_ids) == 0, "states are taken in even when nothing is drafted"
        assert part.token_ids.dtype == torch.int64
        assert part.token_ids.tolist() == full.token_ids[:count].tolist()
        if count and full.probabilities is not None:
            assert part.probabilities is not None
            assert_close(part.probabilities, full.probabilities[:count])
        if full.confidence is not None:
            assert part.confidence is not None and part.confidence.shape == (count,)
            assert_close(part.confidence, full.confidence[:count])


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_sequences_drafted_together_are_drafted_as_alone(name: str, vocabulary: str):
    """Contexts of unlike lengths, longer than a chunk of attention, at unlike points of their decoding."""
    drafter = build(name, vocabulary=vocabulary)
    count = drafter.num_draft_tokens
    samples = [document("0" * length, seed=length) for length in (12, 190, 5, 150)]
    together, alone = ([context_of(sample, anchor=1) for sample in samples] for _ in "ab")
    for step in range(3):
        forced = torch.stack([sample.token_ids[-1:].repeat(count) for sample in samples])
        options = {"num_draft_tokens": count, "sampling": SAMPLED}
        proposal = drafter.propose(together, forced_token_ids=forced, **options)
        for row, (sample, context) in enumerate(zip(samples, alone, strict=True)):
            expected = propose(drafter, context, forced_token_ids=forced[row], **options)
            for field in ("token_ids", "probabilities", "confidence", "top_probability"):
                found, wanted = getattr(proposal[row], field), getattr(expected, field)
                assert (found is None) == (wanted is None) and (
                    found is None or torch.allclose(found, wanted, atol=1e-6)
                )
            for each in (context, together[row]):
                new = slice(each.position, min(each.position + 1 + 70 * step * row, len(sample.token_ids) - 1))
                each.advance(sample.token_ids[new], sample.hidden_states[new], int(sample.token_ids[new.stop]))
    assert [context.position for context in together] == [4, 189, 4, 149]


def assert_same_output(actual: DraftOutput, parts: list[DraftOutput]) -> None:
    for field in ("hidden", "previous_token_ids", "labels", "supervised", "teacher_hidden"):
        joined, expected = getattr(actual, field), torch.cat([getattr(part, field) for part in parts])
        # What lies beyond a run of supervised slots depends on what comes after the document, and is used nowhere.
        mask = actual.supervised
        if field == "supervised":
            assert torch.equal(joined, expected)
        else:
            assert_close(joined[mask], expected[mask])


@EVERY_DRAFTER
def test_packing_invariance(name: str):
    """Packed in two rows, or each document alone: the same slots, hidden states, labels and loss."""
    drafter = build(name)
    rows = documents()
    alone = [pack([[sample]], row_tokens=len(sample.token_ids)) for row in rows for sample in row]
    with torch.no_grad():
        packed = drafter(pack(rows))
        parts = [drafter(batch) for batch in alone]
        assert_same_output(packed, parts)
        sizes = [len(part.target_states) for part in parts]
        starts = [sum(sizes[:index]) for index in range(len(parts))]
        own = ("hidden", "previous_token_ids", "labels", "supervised")
        joined = DraftOutput(
            *(torch.cat([getattr(part, field) for part in parts]) for field in own),
            teacher=torch.cat([part.teacher + start for part, start in zip(parts, starts, strict=True)]),
            target_states=torch.cat([part.target_states for part in parts]),
        )
        batch = pack(rows)
        assert_close(drafter.loss(packed, batch).total, drafter.loss(joined, batch).total)


@EVERY_DRAFTER
def test_batch_invariance(name: str):
    """Two rows in one batch, or one by one with the same few anchors."""
    drafter = build(name, **({} if name == "eagle3" else {"num_anchors": 3}))
    both = tiny_batch()
    with torch.no_grad():
        assert_same_output(drafter(both), [drafter(rows_of(both, [row])) for row in (0, 1)])


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_loss_and_gradients_do_not_depend_on_the_chunks(name: str, vocabulary: str):
    batch = tiny_batch()

    def computed(head_chunk_tokens: int):
        drafter = build(name, vocabulary=vocabulary, head_chunk_tokens=head_chunk_tokens)
        terms = drafter.loss(drafter(batch), batch)
        terms.total.backward()
        return terms, [p.grad for p in drafter.parameters()]

    whole, expected = computed(10_000)
    for size in (1, 7, 16):
        terms, gradients = computed(size)
        assert_close(terms.total, whole.total)
        for term in whole.terms:
            assert_close(terms.terms[term], whole.terms[term])
        for actual, gradient in zip(gradients, expected, strict=True):
            assert actual is not None and gradient is not None
            assert_close(actual, gradient, relative=2e-5)


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_agreement_is_with_the_target_over_its_whole_vocabulary(name: str, vocabulary: str):
    drafter = build(name, vocabulary=vocabulary)
    with torch.no_grad():
        output = drafter(tiny_batch())
        drafted = logits_of(drafter, output).argmax(-1)
    agreement = drafter.agreement(output)
    assert agreement.shape == output.supervised.shape and agreement.dtype == torch.bool
    for block in range(len(drafted)):
        for slot in range(drafted.shape[1]):
            wanted = int(drafter.target_head.logits(output.teacher_hidden[block, slot]).argmax())
            offered = int(VOCABULARIES[vocabulary].draft_to_target[drafted[block, slot]])
            assert bool(agreement[block, slot]) == (wanted == offered)
    assert 0 <= int(agreement.sum()) < agreement.numel()


@EVERY_DRAFTER
def test_a_batch_without_anchors_costs_nothing(name: str):
    """Every parameter has a gradient, of zero: DDP waits for it from each rank."""
    drafter = build(name)
    batch = pack([[document("0000", seed=0), document("10", seed=1)]])
    output = drafter(batch)
    assert output.hidden.shape[0] == 0
    terms = drafter.loss(output, batch)
    assert terms.total == 0 and all(term == 0 for term in terms.terms.values())
    terms.total.backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in drafter.parameters())
    assert drafter.agreement(output).shape == output.supervised.shape


@EVERY_DRAFTER
@BOTH_VOCABULARIES
def test_training_fits_a_batch(name: str, vocabulary: str):
    drafter = build(name, vocabulary=vocabulary, lr=1e-2)
    batch, losses = tiny_batch(), []
    optimizer = drafter.recipe.optimizer.build(drafter)
    for _ in range(8):
        optimizer.zero_grad()
        loss = drafter.loss(drafter(batch), batch).total
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
        assert all((p.grad != 0).any() for p in drafter.parameters() if p.grad is not None), "every weight learns"
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.85 * losses[0], losses


def fit(drafter: Drafter, batches: list[Batch], folder: Path, callbacks: Sequence[L.Callback] = (), **options: Any):
    """The fitted trainer of one pass over ``batches``, validated on them at its end."""
    loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # pyright: ignore
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(drafter, loader, loader)
    return trainer


@EVERY_DRAFTER
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning_trains_and_validates_it(name: str, tmp_path: Path):
    drafter = build(name, vocabulary="reduced", **({} if name == "eagle3" else {"num_anchors": ALL}))
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    borrowed = drafter.target_head.lm_head.clone()
    trainer = fit(drafter, [tiny_batch(), tiny_batch()], tmp_path, max_steps=2)
    assert trainer.global_step == 2
    assert all((drafter.state_dict()[key] != before[key]).any() for key in before)
    assert torch.equal(drafter.target_head.lm_head, borrowed)
    logged = trainer.logged_metrics | trainer.callback_metrics
    assert {"train/loss", "train/gradient_norm", "val/loss", "val/acceptance_length_estimate"} <= set(logged)
    with torch.no_grad():
        loss = drafter.loss(drafter(tiny_batch()), tiny_batch()).total
    assert float(logged["val/loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert 1 <= float(logged["val/acceptance_length_estimate"]) <= 1 + drafter.num_draft_tokens


@EVERY_DRAFTER
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_accumulated_rows_train_like_one_batch_of_them(name: str, tmp_path: Path):
    """Rows of very different weight: the normalizer is that of the whole step. The last step has one row only."""
    rows = [pack([documents()[0]]), pack([[document("0110", seed=60)]]), pack([documents()[1]])]
    joined = [pack([documents()[0], [document("0110", seed=60)]]), rows[2]]
    joined[0] = replace(joined[0], row_ids=(rows[0].row_ids[0], rows[1].row_ids[0]))
    by_row, together = build(name), build(name)
    trainers = [
        fit(by_row, rows, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.05),
        fit(together, joined, tmp_path, gradient_clip_val=0.05),
    ]
    assert [trainer.global_step for trainer in trainers] == [2, 2]
    for key in ("train/loss", "train/gradient_norm"):
        found = [float(trainer.callback_metrics[key]) for trainer in trainers]
        assert found[0] == pytest.approx(found[1], rel=1e-5), key
    for key, value in together.state_dict().items():
        # Adam divides by the gradient's size: of a gradient near zero, rounding is all that is left.
        assert_close(by_row.state_dict()[key], value, relative=5e-5)


class Refusing(L.Callback):
    """A guard that refuses one step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def refuses(self, *, step: int, loss: float, gradient_norm: float) -> bool:
        self.seen.append((step, loss, gradient_norm))
        return step == 1


@EVERY_DRAFTER
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_refused_step_changes_no_weight(name: str, tmp_path: Path):
    drafter, once = build(name), build(name)
    guard = Refusing()
    fit(drafter, [tiny_batch(), tiny_batch()], tmp_path, [guard])
    fit(once, [tiny_batch()], tmp_path)
    assert [step for step, _, _ in guard.seen] == [0, 1]
    assert all(loss > 0 and norm > 0 for _, loss, norm in guard.seen)
    for key, value in once.state_dict().items():
        assert torch.equal(drafter.state_dict()[key], value)


@EVERY_DRAFTER
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_peers_normalizer_refuses_accumulation(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"loss\.normalizer=speculators"):
        fit(build(name, loss=loss_of("speculators")), [tiny_batch()], tmp_path, accumulate_grad_batches=2)


def test_a_scaled_rope_is_the_targets():
    """YaRN: frequencies and the attention factor in cos and sin, at positions beyond the original context."""
    scaled = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    target = replace(SPEC, rope_parameters=scaled)
    exact = Qwen3Config(
        hidden_size=SPEC.hidden_size,
        num_attention_heads=SPEC.num_attention_heads,
        head_dim=SPEC.head_dim,
        max_position_embeddings=SPEC.max_position_embeddings,
        rope_parameters=scaled,
    )
    position = torch.tensor([0, 1, 1023, 4000])
    cos, sin = Rotary(layer_config(target, num_layers=1))(position)
    expected = Qwen3RotaryEmbedding(exact)(torch.zeros(1), position[None])
    plain, _ = Rotary(layer_config(SPEC, num_layers=1))(position)
    assert torch.equal(cos[:, 0], expected[0][0]) and torch.equal(sin[:, 0], expected[1][0])
    assert float(cos[0, 0, 0]) > 1.0, "the attention factor"
    assert not torch.allclose(cos, plain)
