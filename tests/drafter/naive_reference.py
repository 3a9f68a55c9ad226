"""Drafters as plain loops over documents, slots, heads and keys, written from sections 2-4 of the reference.

One document at a time, so packing does not exist here; fp64. ``weights`` are the drafter's own, by name.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from tiny_world import SPEC
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.target.protocol import TargetHead

Weights = Mapping[str, Tensor]
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


def block_hidden(w: Weights, head: TargetHead, sample: TargetSample, anchor: int, block_size: int) -> list[Tensor]:
    """Normed hidden state of every slot of the block at ``anchor``."""
    context = []
    for j in range(anchor):
        state = torch.cat([layer.double() for layer in sample.hidden_states[j]])
        context.append(rms_norm(w["fc.weight"] @ state, w["hidden_norm.weight"]))
    ids = [int(sample.token_ids[anchor])] + [SPEC.mask_token_id] * (block_size - 1)
    x = [head.embedding[token].double() for token in ids]
    for layer in range(num_layers(w)):
        normed = [rms_norm(state, w[f"layers.{layer}.input_layernorm.weight"]) for state in x]
        visible = [key_value(w, layer, c, j) for j, c in enumerate(context)]
        visible += [key_value(w, layer, u, anchor + k) for k, u in enumerate(normed)]
        for k in range(block_size):
            x[k] = x[k] + attention(w, layer, normed[k], anchor + k, visible)
            x[k] = x[k] + mlp(w, layer, x[k])
    return [rms_norm(state, w["norm.weight"]) for state in x]


def chain_hidden(w: Weights, head: TargetHead, sample: TargetSample, slot: int, steps: int) -> list[Tensor]:
    """Normed hidden state of EAGLE-3's slot ``slot`` at every training-time-test step."""
    tokens = sample.token_ids.tolist()
    fused = [w["fc.weight"] @ torch.cat([g.double() for g in states]) for states in sample.hidden_states[: slot + 1]]
    keys: list[KeyValues] = [[] for _ in range(num_layers(w))]

    def run(token: int, state: Tensor, position: int) -> Tensor:
        for layer in range(num_layers(w)):
            norm = w[f"layers.{layer}.input_layernorm.weight"]
            if layer == 0:
                embedding = rms_norm(head.embedding[token].double(), norm)
                inputs = torch.cat([embedding, rms_norm(state, w["layers.0.hidden_norm.weight"])])
            else:
                inputs = rms_norm(state, norm)
            keys[layer].append(key_value(w, layer, inputs, position))
            state = state + attention(w, layer, inputs, position, keys[layer])
            state = state + mlp(w, layer, state)
        return state

    # Step 0 of slots 0..i one after the other, then the slot's own further steps: a plain chain with a cache.
    for i in range(slot + 1):
        state = run(tokens[i + 1], fused[i], i)
    out = [state]
    for step in range(1, steps):
        out.append(run(tokens[slot + 1 + step], out[-1], slot + step))
    return [rms_norm(state, w["norm.weight"]) for state in out]


def teacher(head: TargetHead, sample: TargetSample, index: int, draft_ids: Sequence[int]) -> Tensor:
    """The target's distribution after token ``index``, renormalised on the draft vocabulary."""
    normed = rms_norm(sample.last_hidden_state[index].double(), head.norm_weight.double())
    return torch.stack([head.lm_head[token].double() @ normed for token in draft_ids]).softmax(0)


def block_anchors(sample: TargetSample) -> list[int]:
    mask = sample.loss_mask.tolist()
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def dspark_loss(
    w: Weights,
    head: TargetHead,
    samples: Sequence[TargetSample],
    *,
    block_size: int,
    gamma: float,
    draft_ids: Sequence[int],
    weights: Mapping[str, float],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Section 4.2 over every anchor of every document: total and the normalised terms."""
    sums: dict[str, Tensor] = {name: torch.zeros((), dtype=torch.float64) for name in ("ce", "l1", "confidence")}
    denominator = 0.0
    for sample in samples:
        tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for p in block_anchors(sample):
            hidden = block_hidden(w, head, sample, p, block_size)
            for k in range(block_size):
                if p + k + 1 >= len(tokens) or not mask[p + k + 1]:
                    break
                slot_weight = math.exp(-k / gamma)
                denominator += slot_weight
                e = w["markov_head.markov_w1.weight"][tokens[p + k]]
                base = torch.stack([head.lm_head[token].double() @ hidden[k] for token in draft_ids])
                z = base + w["markov_head.markov_w2.weight"] @ e
                q, target = z.softmax(0), teacher(head, sample, p + k, draft_ids)
                l1 = sum(abs(q[v] - target[v]) for v in range(len(draft_ids)))
                assert isinstance(l1, Tensor)
                accept = float(min(max(1 - 0.5 * float(l1.detach()), 0.0), 1.0))
                logit = w["confidence_head.proj.weight"][0] @ torch.cat([hidden[k], e])
                c = torch.sigmoid(logit + w["confidence_head.proj.bias"][0])
                if tokens[p + k + 1] in draft_ids:
                    sums["ce"] = sums["ce"] - slot_weight * torch.log(q[draft_ids.index(tokens[p + k + 1])])
                sums["l1"] = sums["l1"] + slot_weight * l1
                bce = -(accept * torch.log(c) + (1 - accept) * torch.log(1 - c))
                sums["confidence"] = sums["confidence"] + slot_weight * bce
    terms = {name: value / (denominator + 1e-6) for name, value in sums.items()}
    return sum((weights[name] * terms[name] for name in terms), torch.zeros((), dtype=torch.float64)), terms


def dflash_loss(
    w: Weights,
    head: TargetHead,
    samples: Sequence[TargetSample],
    *,
    block_size: int,
    gamma: float,
    draft_ids: Sequence[int],
) -> Tensor:
    """1 + N: slot k = 1..B-1 predicts the token k places after the anchor, weight exp(-(k - 1) / gamma)."""
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for p in block_anchors(sample):
            hidden = block_hidden(w, head, sample, p, block_size)
            for k in range(1, block_size):
                if p + k >= len(tokens) or not mask[p + k]:
                    break
                slot_weight = math.exp(-(k - 1) / gamma)
                denominator += slot_weight
                if tokens[p + k] in draft_ids:
                    z = torch.stack([head.lm_head[token].double() @ hidden[k] for token in draft_ids])
                    total = total - slot_weight * z.log_softmax(0)[draft_ids.index(tokens[p + k])]
    return total / (denominator + 1e-6)


def eagle3_loss(
    w: Weights,
    head: TargetHead,
    samples: Sequence[TargetSample],
    *,
    steps: int,
    step_decay: float,
    draft_ids: Sequence[int],
) -> Tensor:
    """Soft CE; each step is the mean over its supervised slots; weight step_decay^t (section 4.1)."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    counts = [0] * steps
    for sample in samples:
        tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        for i in range(len(tokens) - 2):
            supervised = 0
            while (
                supervised < steps
                and i + 2 + supervised < len(tokens)
                and mask[i + 1 + supervised]
                and mask[i + 2 + supervised]
            ):
                supervised += 1
            hidden = chain_hidden(w, head, sample, i, supervised) if supervised else []
            for t in range(supervised):
                z = torch.stack([head.lm_head[token].double() @ hidden[t] for token in draft_ids])
                target, log_q = teacher(head, sample, i + 1 + t, draft_ids), z.log_softmax(0)
                sums[t] = sums[t] - sum(target[v] * log_q[v] for v in range(len(draft_ids)))
                counts[t] += 1
    total = torch.zeros((), dtype=torch.float64)
    for t in range(steps):
        total = total + step_decay**t * sums[t] / max(counts[t], 1)
    return total
