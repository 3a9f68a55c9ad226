"""DFlash2 against plain loops, and what is its alone; ``test_speculators_parity`` compares it with Speculators' classes."""

import math
from typing import Any

import naive_reference as naive
import pytest
import torch
from naive_reference import Weights, rms_norm
from tiny_world import (
    DRAFTERS,
    SPEC,
    VOCABULARIES,
    assert_close,
    build,
    documents,
    logits_of,
    loss_of,
    pack,
    recipe,
    target_head,
)
from torch import Tensor

from dspark_lab.drafter.base import Borrowed
from dspark_lab.drafter.dflash2 import DFlash2
from dspark_lab.records import TargetSample

BLOCK_SIZE, GROUP_SIZE, TOP_K = 4, 4, 5
ROWS = (("0110", "1", "00101111"), ("111011",))  # short documents: the loops are slow


def made(**options: Any) -> tuple[DFlash2, Weights]:
    drafter = build("dflash2", **options)
    assert isinstance(drafter, DFlash2)
    return drafter, {name: p.detach().double() for name, p in drafter.named_parameters()}


def convolved(w: Weights, name: str, side: int, normed: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """Convolution 0 or 1 over ``states``, its kernels from ``normed``, channel by channel."""
    base, projection = w[f"{name}.base_kernel"][side], w[f"{name}.kernel_projection.weight"]
    num_taps, size = base.shape
    out = []
    for k in range(len(states)):
        delta = (projection @ normed[k]).view(2, num_taps, size // GROUP_SIZE)[side]
        values = []
        for channel in range(size):
            value = torch.zeros((), dtype=torch.float64)
            for tap in range(min(num_taps, k + 1)):
                kernel = base[tap, channel] + delta[tap, channel // GROUP_SIZE]
                value = value + kernel * states[k - tap][channel]
            values.append(value)
        out.append(torch.stack(values))
    return out


def naive_hidden(w: Weights, sample: TargetSample, anchor: int) -> list[Tensor]:
    """Normed hidden state of every slot of the block at ``anchor``."""
    context = []
    for j in range(anchor):
        state = torch.cat([layer.double() for layer in sample.hidden_states[j]])
        context.append(rms_norm(w["fc.weight"] @ state, w["hidden_norm.weight"]))
    ids = [int(sample.token_ids[anchor])] + [SPEC.mask_token_id] * (BLOCK_SIZE - 1)
    x = [target_head().embedding[token].double() for token in ids]
    for layer in range(naive.num_layers(w)):
        place = f"layers.{layer}"
        normed = [rms_norm(state, w[f"{place}.input_layernorm.weight"]) for state in x]
        inputs = convolved(w, f"{place}.attention_conv", 0, normed, normed)
        visible = [naive.key_value(w, layer, c, j) for j, c in enumerate(context)]
        visible += [naive.key_value(w, layer, u, anchor + k) for k, u in enumerate(inputs)]
        attended = [naive.attention(w, layer, u, anchor + k, visible) for k, u in enumerate(inputs)]
        attended = convolved(w, f"{place}.attention_conv", 1, normed, attended)
        x = [state + added for state, added in zip(x, attended, strict=True)]
        normed = [rms_norm(state, w[f"{place}.post_attention_layernorm.weight"]) for state in x]
        inputs = convolved(w, f"{place}.mlp_conv", 0, normed, normed)
        added = convolved(w, f"{place}.mlp_conv", 1, normed, [mlp(w, place, u) for u in inputs])
        x = [state + one for state, one in zip(x, added, strict=True)]
    return [rms_norm(state, w["norm.weight"]) for state in x]


def mlp(w: Weights, place: str, x: Tensor) -> Tensor:
    gate, up = w[f"{place}.mlp.gate_proj.weight"] @ x, w[f"{place}.mlp.up_proj.weight"] @ x
    return w[f"{place}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def scores(w: Weights, hidden: Tensor, previous: int, draft_ids: list[int]) -> tuple[Tensor, Tensor]:
    """U [V_d] and S [V_d], which is minus infinity outside the candidates."""
    unary = torch.stack([target_head().lm_head[token].double() @ hidden for token in draft_ids])
    out = torch.full_like(unary, -math.inf)
    edge = w["candidate_selector.predecessor_codebook"][previous] * (
        w["candidate_selector.hidden_projection.weight"] @ hidden
    )
    for index in unary.argsort(descending=True)[:TOP_K].tolist():
        out[index] = unary[index] + edge @ w["candidate_selector.successor_codebook"][draft_ids[index]]
    return unary, out


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("sample_from_anchor", [False, True], ids=["1 + N", "anchor-first"])
def test_scores_and_loss_are_the_plain_loops(vocabulary: str, sample_from_anchor: bool):
    """Hidden states, S of every slot, and both terms with their weights; some labels are no candidates."""
    drafter, w = made(vocabulary=vocabulary, sample_from_anchor=sample_from_anchor, selector_weight=0.7)
    rows, draft_ids = documents(ROWS), VOCABULARIES[vocabulary].draft_to_target.tolist()
    batch = pack(rows)
    with torch.no_grad():
        output = drafter(batch)
        terms, found = drafter.loss(output, batch), logits_of(drafter, output)
    hidden, expected, missed = [], [], 0
    sums, weight = {"ce": 0.0, "selector": 0.0}, 0.0
    for sample in (sample for row in rows for sample in row):
        tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for anchor in (i for i in range(len(tokens) - 1) if mask[i] and mask[i + 1]):
            states = naive_hidden(w, sample, anchor)[0 if sample_from_anchor else 1 :]
            for k, state in enumerate(states):
                label = anchor + k + 1
                if label >= len(tokens) or not all(mask[anchor : label + 1]):
                    break
                unary, scored = scores(w, state, tokens[label - 1], draft_ids)
                hidden.append(state)
                expected.append(scored)
                decay = math.exp(-k / 4.0)
                weight += decay
                if tokens[label] not in draft_ids:
                    continue
                place = draft_ids.index(tokens[label])
                sums["ce"] -= decay * float(unary.log_softmax(0)[place])
                if scored[place].isinf():
                    missed += 1
                else:
                    sums["selector"] -= decay * float(scored.log_softmax(0)[place])
    assert missed > 2
    assert_close(output.hidden[output.supervised], torch.stack(hidden))
    scored = torch.stack(expected)
    assert torch.equal(found[output.supervised].isinf(), scored.isinf())
    assert_close(found[output.supervised].nan_to_num(neginf=0.0), scored.nan_to_num(neginf=0.0))
    for term, total in sums.items():
        assert float(terms.terms[term]) == pytest.approx(total / weight, rel=1e-5)
    assert float(terms.total) == pytest.approx((sums["ce"] + 0.7 * sums["selector"]) / weight, rel=1e-5)


def test_a_new_drafter_is_dflash_over_its_top_candidates():
    """Identity convolutions and Q = 0."""
    # Not ``build``, which gives it weights that show.
    fresh = DRAFTERS["dflash2"](borrowed=Borrowed(SPEC, target_head(), VOCABULARIES["full"]), recipe=recipe())
    dflash = build("dflash")
    state = fresh.state_dict()
    with torch.no_grad():
        for name, parameter in dflash.named_parameters():
            parameter.copy_(state[name])
    batch = pack(documents(ROWS))
    with torch.no_grad():
        output = fresh(batch)
        assert torch.equal(output.hidden, dflash(batch).hidden)
        unary, scored = fresh.loss_logits(output), logits_of(fresh, output)
    kept = ~scored.isinf()
    assert (kept.sum(-1) == TOP_K).all()
    assert torch.equal(scored[kept], unary[kept])
    assert (scored.amax(-1) == unary.amax(-1)).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"conv_kernel_size": 5}, r"conv_kernel_size=5: must lie in 1\.\.4, the slots of a block"),
        ({"conv_group_size": 3}, "conv_group_size=3 must divide the target's hidden size, 16"),
        ({"selector_top_k": 30}, r"selector_top_k=30: must lie in 1\.\.29"),
        ({"loss": loss_of(terms={"ce": 1.0, "selector": 1.0})}, "weighed by drafter.selector_weight"),
    ],
)
def test_what_it_cannot_be_is_refused(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        build("dflash2", **options)
