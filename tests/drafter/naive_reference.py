"""Drafters as plain loops over documents, slots, heads and keys, written from sections 2-4 of the reference.

One document at a time, so packing does not exist here; fp64. ``weights`` are the drafter's own, by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny_world import SPEC
from torch import Tensor

from dspark_lab.drafter.layers import SlidingWindow
from dspark_lab.drafter.objective import Objective
from dspark_lab.records import TargetSample
from dspark_lab.target.protocol import TargetHead

Weights = Mapping[str, Tensor]
FC_NORM = "fc_norm.0.weight"
KeyValues = list[tuple[list[Tensor], list[Tensor]]]  # of each token: per key head, a key and a value


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + SPEC.rms_norm_eps) * weight


def rope(x: Tensor, position: int) -> Tensor:
    half = SPEC.head_dim // 2
    theta = SPEC.rope_parameters["rope_theta"]
    out: list[Tensor | None] = [None] * SPEC.head_dim
    for i in range(half):
        angle = position * theta ** (-2 * i / SPEC.head_dim)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(out)


def heads(w: Weights, layer: int, name: str, x: Tensor) -> list[Tensor]:
    projected = w[f"layers.{layer}.self_attn.{name}_proj.weight"] @ x
    found = [projected[start : start + SPEC.head_dim] for start in range(0, projected.numel(), SPEC.head_dim)]
    norm = w.get(f"layers.{layer}.self_attn.{name}_norm.weight")
    return found if norm is None else [rms_norm(head, norm) for head in found]


def key_value(w: Weights, layer: int, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
    return [rope(key, position) for key in heads(w, layer, "k", x)], heads(w, layer, "v", x)


def attention(w: Weights, layer: int, x: Tensor, position: int, visible: KeyValues) -> Tensor:
    shared = SPEC.num_attention_heads // SPEC.num_key_value_heads
    out = []
    for index, query in enumerate(heads(w, layer, "q", x)):
        query = rope(query, position)
        scores = torch.stack([query @ keys[index // shared] * SPEC.head_dim**-0.5 for keys, _ in visible])
        weight = scores.softmax(0)
        out.append(sum(weight[n] * values[index // shared] for n, (_, values) in enumerate(visible)))
    return w[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(out)


def mlp(w: Weights, layer: int, x: Tensor) -> Tensor:
    x = rms_norm(x, w[f"layers.{layer}.post_attention_layernorm.weight"])
    gate, up = w[f"layers.{layer}.mlp.gate_proj.weight"] @ x, w[f"layers.{layer}.mlp.up_proj.weight"] @ x
    return w[f"layers.{layer}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def num_layers(w: Weights) -> int:
    return len({name.split(".")[1] for name in w if name.startswith("layers.")})


def in_window(j: int, query: int, anchor: int, window: SlidingWindow | None) -> bool:
    """Whether a query at index ``query`` of a block (chain) that starts at ``anchor`` sees the context key ``j``."""
    if window is None:
        return True
    return j >= anchor - window.tokens if window.origin == "anchor" else j > query - window.tokens


def block_hidden(
    w: Weights,
    head: TargetHead,
    sample: TargetSample,
    anchor: int,
    block_size: int,
    window: SlidingWindow | None = None,
) -> list[Tensor]:
    """Normed hidden state of every slot of the block at ``anchor``. ``window`` of every layer but its full ones."""
    context = []
    for j in range(anchor):
        state = torch.cat([layer.double() for layer in sample.hidden_states[j]])
        context.append(rms_norm(w["fc.weight"] @ state, w["hidden_norm.weight"]))
    ids = [int(sample.token_ids[anchor])] + [SPEC.mask_token_id] * (block_size - 1)
    x = [head.embedding[token].double() for token in ids]
    for layer in range(num_layers(w)):
        here = None if window is None or layer in window.full_layers else window
        normed = [rms_norm(state, w[f"layers.{layer}.input_layernorm.weight"]) for state in x]
        for k in range(block_size):
            visible = [
                key_value(w, layer, c, j) for j, c in enumerate(context) if in_window(j, anchor + k, anchor, here)
            ]
            visible += [
                key_value(w, layer, u, anchor + other)
                for other, u in enumerate(normed)
                if here is None or not here.causal or other <= k
            ]
            x[k] = x[k] + attention(w, layer, normed[k], anchor + k, visible)
        x = [state + mlp(w, layer, state) for state in x]
    return [rms_norm(state, w["norm.weight"]) for state in x]


def chain_hidden(
    w: Weights,
    head: TargetHead,
    sample: TargetSample,
    slot: int,
    steps: int,
    *,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    window: SlidingWindow | None = None,
) -> list[Tensor]:
    """Normed hidden state of EAGLE-3's slot ``slot`` at every training-time-test step. Norms are those that ``w`` has."""
    tokens = sample.token_ids.tolist()
    keys: list[list[tuple[int, tuple[list[Tensor], list[Tensor]]]]] = [[] for _ in range(num_layers(w))]

    def fuse(states: Tensor) -> Tensor:
        chunks = [state.double() for state in states]
        chunks = [rms_norm(g, w[f"fc_norm.{n}.weight"]) for n, g in enumerate(chunks)] if FC_NORM in w else chunks
        joined = torch.cat(chunks)
        return w["fc.weight"] @ (rms_norm(joined, w["input_norm.weight"]) if "input_norm.weight" in w else joined)

    def run(token: int, state: Tensor, position: int, first: int) -> Tensor:
        for layer in range(num_layers(w)):
            norm = w[f"layers.{layer}.input_layernorm.weight"]
            if layer == 0:
                embedding = rms_norm(head.embedding[token].double(), norm)
                normed = rms_norm(state, w["layers.0.hidden_norm.weight"])
                inputs = torch.cat([embedding, normed])
                state = normed if norm_before_residual else state
            else:
                inputs = rms_norm(state, norm)
            keys[layer].append((position, key_value(w, layer, inputs, position)))
            here = None if window is None or layer in window.full_layers else window
            # The anchor of a chain is the place after its slot: from there the window counts back.
            visible = [kv for j, kv in keys[layer] if j > slot or in_window(j, position, first + 1, here)]
            state = state + attention(w, layer, inputs, position, visible)
            state = state + mlp(w, layer, state)
        return rms_norm(state, w["norm.weight"]) if norm_output else state

    # Step 0 of slots 0..i one after the other, then the slot's own further steps: a plain chain with a cache.
    for i in range(slot + 1):
        state = run(tokens[i + 1], fuse(sample.hidden_states[i]), i, i)
    out = [state]
    for step in range(1, steps):
        out.append(run(tokens[slot + 1 + step], out[-1], slot + step, slot))
    return out if norm_output else [rms_norm(state, w["norm.weight"]) for state in out]


def teacher(head: TargetHead, sample: TargetSample, index: int, draft_ids: Sequence[int]) -> Tensor:
    """The target's distribution after token ``index``, renormalised on the draft vocabulary."""
    normed = rms_norm(sample.last_hidden_state[index].double(), head.norm_weight.double())
    return torch.stack([head.lm_head[token].double() @ normed for token in draft_ids]).softmax(0)


def divergences(z: Tensor, p: Tensor, label: int | None) -> dict[str, Tensor]:
    """Every term of sections 4.1 to 4.3 from draft logits and the target's distribution, token by token.

    ``label``: draft id; None where the draft vocabulary lacks it.
    """
    q = z.softmax(0)
    zero = torch.zeros((), dtype=torch.float64)
    kl, reverse, soft, js, l1 = zero, zero, zero, zero, zero
    for p_v, q_v in zip(p, q, strict=True):
        m = (p_v + q_v) / 2
        kl = kl + p_v * torch.log(p_v / q_v)
        reverse = reverse + q_v * torch.log(q_v / p_v)
        soft = soft - p_v * torch.log(q_v)
        js = js + 0.5 * p_v * torch.log(p_v / m) + 0.5 * q_v * torch.log(q_v / m)
        l1 = l1 + abs(p_v - q_v)
    alpha = 1 - l1 / 2
    mix = math.exp(-3 * float(alpha.detach()))
    return {
        "ce": zero if label is None else -torch.log(q[label]),
        "probability": zero if label is None else q[label],
        "soft_ce": soft,
        "kl": kl,
        "reverse_kl": reverse,
        "js": js,
        "tv": l1 / 2,
        "l1": l1,
        "nla": -torch.log(alpha),
        "lk": mix * kl + (1 - mix) * l1 / 2,
    }


def markov_bias(w: Weights, kind: str | None, previous: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
    """The bias of each slot of a block from the tokens before them (section 5)."""
    if kind is None:
        return [torch.zeros((), dtype=torch.float64)] * len(hidden)
    out, state = [], torch.zeros(w["markov_head.markov_w1.weight"].shape[1], dtype=torch.float64)
    for token, h in zip(previous, hidden, strict=True):
        e = w["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
            e = torch.sigmoid(gate) * e
        if kind == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h]) + w["markov_head.joint_proj.bias"]
            rank = len(state)
            gate = torch.sigmoid(joint[:rank])
            state = gate * state + (1 - gate) * torch.tanh(joint[rank : 2 * rank])
            e = torch.tanh(joint[2 * rank :])
        out.append(w["markov_head.markov_w2.weight"] @ e)
    return out


def slot_weights(objective: Objective, probabilities: Mapping[int, float]) -> dict[int, float]:
    """Weight of each supervised slot (section 3.6), from the probability of its label."""
    if objective.weighting == "exponential":
        return {k: math.exp(-k / objective.decay) for k in probabilities}
    if objective.weighting == "geometric":
        return {k: objective.decay**k for k in probabilities}
    weights = {}
    for k in probabilities:
        weights[k] = 0.0
        for j in probabilities:
            if j >= k:
                smooth = [(1 - objective.decay) * probabilities[i] + objective.decay for i in probabilities if i <= j]
                weights[k] += math.prod(smooth)
    return weights


class Sums:
    """Numerators by term and slot, and what each normalizer divides them by."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.terms: dict[str, dict[int, Tensor]] = {name: {} for name in objective.active}
        self.counts: dict[int, int] = {}
        self.decayed = 0.0

    def add(self, slots: Mapping[int, Mapping[str, Tensor]]) -> None:
        """The terms of one block's (chain's) supervised slots."""
        weights = slot_weights(self.objective, {k: float(terms["probability"].detach()) for k, terms in slots.items()})
        for k, terms in slots.items():
            self.counts[k] = self.counts.get(k, 0) + 1
            self.decayed += 1.0 if self.objective.weighting == "dpace" else weights[k]
            for name in self.terms:
                self.terms[name][k] = self.terms[name].get(k, torch.zeros(())) + weights[k] * terms[name]

    def divided(self, normalizer: str, *, chained: bool, num_tokens: int) -> dict[str, Tensor]:
        def divisor(k: int) -> float:
            if normalizer == "global":
                return self.decayed
            if normalizer == "speculators":
                return (self.counts[k] if chained else sum(self.counts.values())) + 1e-5
            return num_tokens if chained else self.decayed + 1e-6

        zero = torch.zeros((), dtype=torch.float64)
        return {name: sum((v / divisor(k) for k, v in slots.items()), zero) for name, slots in self.terms.items()}


def total(objective: Objective, terms: Mapping[str, Tensor]) -> Tensor:
    return sum((objective.active[name] * term for name, term in terms.items()), torch.zeros((), dtype=torch.float64))


class PackedRow:
    """Documents one after the other, padded to ``row_tokens``: what a peer that packs sees of a row."""

    def __init__(self, samples: Sequence[TargetSample], row_tokens: int) -> None:
        self.mask = [bool(m) for sample in samples for m in sample.loss_mask]
        self.tokens = [int(t) for sample in samples for t in sample.token_ids]
        self.place = [(sample, i) for sample in samples for i in range(len(sample.token_ids))]
        self.row_tokens = row_tokens

    def assistants(self, index: int, of: TargetSample | None) -> bool:
        """Whether the token is the assistant's, and of that document if one is given."""
        inside = index < len(self.mask) and self.mask[index]
        return inside and (of is None or self.place[index][0] is of)


def block_loss(
    w: Weights,
    head: TargetHead,
    rows: Sequence[Sequence[TargetSample]],
    objective: Objective,
    *,
    row_tokens: int,
    block_size: int,
    anchor_first: bool,
    draft_ids: Sequence[int],
    normalizer: str = "global",
    supervision: str = "drafted",
    markov: str | None = None,
    window: SlidingWindow | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DFlash and DSpark over every anchor of every row: total and the normalised terms (sections 3.2 to 4.3)."""
    sums = Sums(objective)
    for samples in rows:
        row = PackedRow(samples, row_tokens)
        for p in range(len(row.tokens)):
            sample, anchor = row.place[p]
            if supervision == "speculators":
                eligible = row.mask[p] and p < row_tokens - block_size
            else:
                eligible = row.mask[p] and row.assistants(p + 1, sample)
            if not eligible:
                continue
            hidden = block_hidden(w, head, sample, anchor, block_size, window)
            slots = list(range(block_size) if anchor_first else range(1, block_size))
            labels = [p + k + 1 if anchor_first else p + k for k in slots]
            # Tokens beyond the row's last document are padding: token 0.
            padded = [*row.tokens, *[0] * (row_tokens + 1 - len(row.tokens))]
            previous = [padded[j - 1] for j in labels]
            bias = markov_bias(w, markov, previous, [hidden[k] for k in slots])
            supervised: dict[int, dict[str, Tensor]] = {}
            for n, (k, j) in enumerate(zip(slots, labels, strict=True)):
                if supervision == "speculators":
                    if not row.assistants(p + k, None):
                        continue
                elif not row.assistants(j, sample):
                    break
                of, at = row.place[j - 1] if j - 1 < len(row.place) else (samples[0], 0)
                target = teacher(head, of, at, draft_ids)
                z = torch.stack([head.lm_head[token].double() @ hidden[k] for token in draft_ids]) + bias[n]
                token = draft_ids[int(target.argmax())] if objective.labels == "target" else padded[j]
                terms = divergences(z, target, draft_ids.index(token) if token in draft_ids else None)
                if "confidence" in objective.active:
                    features = hidden[k]
                    if markov is not None:
                        features = torch.cat([features, w["markov_head.markov_w1.weight"][previous[n]]])
                    logit = w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
                    accept, c = 1 - float(terms["tv"].detach()), torch.sigmoid(logit)
                    terms["confidence"] = -(accept * torch.log(c) + (1 - accept) * torch.log(1 - c))
                supervised[n] = terms
            sums.add(supervised)
    terms = sums.divided(normalizer, chained=False, num_tokens=len(rows) * row_tokens)
    return total(objective, terms), terms


def eagle3_loss(
    w: Weights,
    head: TargetHead,
    samples: Sequence[TargetSample],
    objective: Objective,
    *,
    steps: int,
    draft_ids: Sequence[int],
    num_tokens: int,
    normalizer: str = "global",
    supervision: str = "drafted",
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every slot of every document, every training-time-test step (sections 1.4, 3.1 and 4.1)."""
    sums = Sums(objective)
    for sample in samples:
        tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for i in range(len(tokens) - 1):
            chosen = []
            for t in range(steps):
                fed = i + 1 + t
                if fed >= len(tokens):
                    break
                if supervision == "drafted" and not (mask[fed] and fed + 1 < len(tokens) and mask[fed + 1]):
                    break
                if mask[fed] if supervision == "speculators" else mask[i + t] or supervision == "drafted":
                    chosen.append(t)
            hidden = chain_hidden(w, head, sample, i, chosen[-1] + 1, **options) if chosen else []
            slots = {}
            for t in chosen:
                z = torch.stack([head.lm_head[token].double() @ hidden[t] for token in draft_ids])
                target = teacher(head, sample, i + 1 + t, draft_ids)
                label = int(target.argmax()) if objective.labels == "target" else None
                if objective.labels == "data" and i + 2 + t < len(tokens) and tokens[i + 2 + t] in draft_ids:
                    label = draft_ids.index(tokens[i + 2 + t])
                slots[t] = divergences(z, target, label)
            sums.add(slots)
    terms = sums.divided(normalizer, chained=True, num_tokens=num_tokens)
    return total(objective, terms), terms
