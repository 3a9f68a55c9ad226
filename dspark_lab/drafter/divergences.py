"""How far the drafter's distribution q is from the target's p, and the gradient of that, in closed form and in place.

Every term's gradient to the draft logits z is of one shape, dz = q * (g - sum_v q g) with g = d term / d q, or simpler:
q - onehot for cross-entropy, q - p for KL. So no graph is kept over the vocabulary: the logits become their own gradient,
tile by tile of rows that stay in a CPU's cache. Softmaxes in fp32, at temperature 1; no gradient reaches p.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

TERMS = ("ce", "soft_ce", "kl", "reverse_kl", "js", "tv", "l1", "nla", "lk")
"""Terms an objective may weigh (algorithms.md 4.1-4.3). A drafter may add its own (DSpark: confidence).

ce           -log q[label]
soft_ce      -sum p log q
kl           KL(p || q) = soft_ce less the entropy of p
reverse_kl   KL(q || p)
js           (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2
tv           1/2 sum |p - q|; 1 - tv is the probability that verification accepts a draw from q
l1           sum |p - q| = 2 tv, the DSpark paper's term
nla          -log max(1 - tv, 1e-5) (Samarin et al. 2026, arXiv 2602.23881)
lk           w kl + (1 - w) tv with w = exp(-3 (1 - tv)) without gradient (the same paper's hybrid)
"""

_OF_TARGET = frozenset(TERMS) - {"ce"}
_OF_LOG_P = frozenset({"reverse_kl", "js"})
_OF_ENTROPY = frozenset({"kl", "lk"})
_SMALLEST_ACCEPTANCE = 1e-5
_TILE_ELEMENTS = 1 << 17  # of one fp32 operand: a few of them fit a core's L2 cache


@dataclass(frozen=True, slots=True)
class Divergences:
    """Per slot. ``total`` is the weighted sum of the terms and carries the gradient; the rest is detached.

    ``values`` has the terms with a weight and those asked for besides; ``label_probability`` is q[label], 0 for a label
    that the draft vocabulary lacks. ``labels`` are what ``ce`` is of: draft ids, -1 where there is none.
    """

    total: Tensor
    values: Mapping[str, Tensor]
    label_probability: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distributions: [U, V_d] once per token, and the row of each slot, since slots share tokens."""

    table: Tensor  # p, or log p where a term needs it
    entropy: Tensor | None  # [U]
    argmax: Tensor  # [U]
    row: Tensor  # int64 [...]
    is_log: bool


def diverge(
    logits: Tensor,
    teacher_logits: Tensor | None,
    row: Tensor,
    *,
    weights: Mapping[str, float],
    labels: Tensor | None,
    counted: Tensor | None = None,
    also: frozenset[str] = frozenset(),
) -> Divergences:
    """Terms of each slot.

    ``logits`` [..., V_d] and ``teacher_logits`` [U, V_d] are *consumed*: their memory is used for the result. ``row`` [...]:
    the slot's row of ``teacher_logits`` (None if no term and no label needs it). ``labels`` [...] draft ids, or None for the
    target's arg-max; ``counted`` [...]: False where ``ce`` has no label and is 0. ``also``: terms wanted without a weight.
    """
    wanted = frozenset(weights) | also
    unknown = wanted - frozenset(TERMS)
    assert not unknown, unknown
    teacher = None
    if teacher_logits is not None:
        teacher = _teacher(teacher_logits, row.flatten(), wanted=wanted)
    if labels is None:
        assert teacher is not None
        labels = teacher.argmax[row]
    assert teacher is not None or not wanted & _OF_TARGET
    measured: dict[str, Tensor] = {}
    total = _Weighted.apply(logits, teacher, labels, counted, dict(weights), wanted, measured)
    assert isinstance(total, Tensor)
    probability = measured.pop("probability")
    if counted is None:
        return Divergences(total, measured, probability, labels)
    return Divergences(total, measured, probability * counted, labels.where(counted, -1))


class _Weighted(torch.autograd.Function):
    """sum_term weight * term per slot; after ``forward`` the logits hold its gradient."""

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        teacher: Teacher | None,
        labels: Tensor,
        counted: Tensor | None,
        weights: Mapping[str, float],
        wanted: frozenset[str],
        measured: dict[str, Tensor],
    ) -> Tensor:
        rows = logits.view(-1, logits.shape[-1])
        found = {name: rows.new_zeros(rows.shape[0], dtype=torch.float32) for name in (*wanted, "probability")}
        flat_labels, flat_counted = labels.flatten(), None if counted is None else counted.flatten().float()
        for tile in _tiles(rows):
            parts = _measure(
                rows[tile],
                None if teacher is None else (teacher, teacher.row[tile]),
                flat_labels[tile],
                None if flat_counted is None else flat_counted[tile],
                weights,
                wanted,
                gradient=ctx.needs_input_grad[0],
            )
            for name, part in parts.items():
                found[name][tile] = part
        measured |= {name: value.view(labels.shape) for name, value in found.items()}
        ctx.gradient = logits if ctx.needs_input_grad[0] else None
        total = torch.zeros_like(found["probability"])
        for name, weight in weights.items():
            total += weight * found[name]
        return total.view(labels.shape)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        gradient, ctx.gradient = ctx.gradient, None  # given away: a second backward has nothing left to use
        return gradient.mul_(upstream[0][..., None]), None, None, None, None, None, None


def _measure(
    z: Tensor,
    target: tuple[Teacher, Tensor] | None,
    labels: Tensor,
    counted: Tensor | None,
    weights: Mapping[str, float],
    wanted: frozenset[str],
    *,
    gradient: bool,
) -> dict[str, Tensor]:
    """Terms [n] of a tile of logits [n, V_d], which become the weighted sum's gradient."""
    q = torch.softmax(z, dim=-1, dtype=torch.float32)
    # log sum exp z, from the largest entry, whose probability is at least 1 / V_d.
    log_sum = z.amax(-1).float() - q.amax(-1).log()
    place = labels[:, None]
    found = {"ce": log_sum - z.gather(-1, place).squeeze(-1).float()}
    found["probability"] = torch.exp(-found["ce"])
    if counted is not None:
        found["ce"] *= counted
    hard = weights.get("ce", 0.0) * (torch.ones_like(log_sum) if counted is None else counted)
    soft = torch.zeros_like(log_sum)  # weight of KL's gradient, q - p
    field = None  # d / d q of all other terms
    p = None
    if target is not None and wanted & _OF_TARGET:
        p, log_p, entropy = _target_tile(*target)
        logs = None if log_p is None else _Logs.of(z.float() - log_sum[:, None], log_p)
        found |= _of_target(q, z, log_sum, p, logs, entropy, wanted)
        soft += weights.get("soft_ce", 0.0) + weights.get("kl", 0.0)
        if "lk" in weights:
            soft += weights["lk"] * found["share_of_kl"]
        if gradient:
            field = _field(q, p, logs, found, weights)
    if gradient:
        slope = (hard + soft)[:, None]
        if field is not None:
            slope = slope - _rowdot(q, field)[:, None]
            q.mul_(field.add_(slope))
        else:
            q.mul_(slope)
        if p is not None and weights.keys() & {"soft_ce", "kl", "lk"}:
            q.addcmul_(p, soft[:, None], value=-1.0)
        q.scatter_add_(-1, place, -hard[:, None])
        z.copy_(q)
    return {name: found[name] for name in (*wanted, "probability")}


@dataclass(frozen=True, slots=True)
class _Logs:
    """log q, log p and log m, m = (p + q) / 2, each [n, V_d]: for the terms that need them all over the vocabulary."""

    q: Tensor
    p: Tensor
    m: Tensor

    @classmethod
    def of(cls, log_q: Tensor, log_p: Tensor) -> "_Logs":
        return cls(log_q, log_p, torch.logaddexp(log_p, log_q) - log(2.0))


def _of_target(
    q: Tensor,
    z: Tensor,
    log_sum: Tensor,
    p: Tensor,
    logs: _Logs | None,
    entropy: Tensor | None,
    wanted: frozenset[str],
) -> dict[str, Tensor]:
    """The terms that compare q with p, [n] each, and what their gradients need of them."""
    found = {}
    if wanted & {"tv", "l1", "lk"}:
        found["tv"] = 0.5 * torch.linalg.vector_norm(q - p, ord=1, dim=-1)
        found["l1"] = 2.0 * found["tv"]
    if "nla" in wanted:
        # sum min(p, q) = 1 - tv, exact also where it is small.
        found["acceptance"] = torch.minimum(p, q).sum(-1)
        found["nla"] = -found["acceptance"].clamp(min=_SMALLEST_ACCEPTANCE).log()
    if wanted & {"soft_ce", "kl", "lk"}:
        found["soft_ce"] = log_sum - _rowdot(p, z.float())
        if entropy is not None:
            found["kl"] = found["soft_ce"] - entropy
    if "lk" in wanted:
        found["share_of_kl"] = torch.exp(-3.0 * (1.0 - found["tv"]))
        found["lk"] = found["share_of_kl"] * found["kl"] + (1.0 - found["share_of_kl"]) * found["tv"]
    if logs is not None:
        found["reverse_kl"] = _rowdot(q, logs.q - logs.p)
        found["js"] = 0.5 * (_rowdot(p, logs.p - logs.m) + _rowdot(q, logs.q - logs.m))
    return found


def _field(
    q: Tensor,
    p: Tensor,
    logs: _Logs | None,
    found: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> Tensor | None:
    """d / d q [n, V_d] of the terms that are functions of q beyond KL; None if there are none. Constants do not matter."""
    field = None
    by_distance = weights.get("tv", 0.0) + 2.0 * weights.get("l1", 0.0)
    if by_distance or "lk" in weights:
        slope = torch.full_like(found["tv"], by_distance)
        if "lk" in weights:
            slope += weights["lk"] * (1.0 - found["share_of_kl"])
        field = torch.sub(q, p).sign_().mul_(0.5 * slope[:, None])
    if "nla" in weights:
        acceptance = found["acceptance"]
        slope = weights["nla"] * (acceptance > _SMALLEST_ACCEPTANCE) / acceptance.clamp(min=_SMALLEST_ACCEPTANCE)
        below = (q < p) * -slope[:, None]
        field = below if field is None else field.add_(below)
    if logs is not None:
        own = weights.get("reverse_kl", 0.0) * (logs.q - logs.p)
        if "js" in weights:
            own = own + 0.5 * weights["js"] * (logs.q - logs.m)
        field = own if field is None else field.add_(own)
    return field


def _teacher(logits: Tensor, row: Tensor, *, wanted: frozenset[str]) -> Teacher:
    """Turns the target's logits [U, V_d] into probabilities (or their logarithms), in place."""
    is_log, with_entropy = bool(wanted & _OF_LOG_P), bool(wanted & _OF_ENTROPY)
    argmax = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    entropy = torch.empty(logits.shape[0], device=logits.device) if with_entropy else None
    table = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
    with torch.no_grad():
        for tile in _tiles(logits):
            t = logits[tile]
            argmax[tile] = t.argmax(-1)
            if not wanted & _OF_TARGET:
                continue
            p = torch.softmax(t, dim=-1, dtype=torch.float32)
            log_sum = t.amax(-1).float() - p.amax(-1).log()
            if entropy is not None:
                entropy[tile] = log_sum - _rowdot(p, t.float())
            table[tile] = t.float() - log_sum[:, None] if is_log else p
    return Teacher(table, entropy, argmax, row, is_log)


def _target_tile(teacher: Teacher, row: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """p [n, V_d], log p if the table has it, entropy [n]."""
    entries = teacher.table[row]
    entropy = None if teacher.entropy is None else teacher.entropy[row]
    return (entries.exp(), entries, entropy) if teacher.is_log else (entries, None, entropy)


def _tiles(rows: Tensor) -> list[slice]:
    count = rows.shape[0] if rows.is_cuda else max(_TILE_ELEMENTS // rows.shape[-1], 1)
    return [slice(start, start + count) for start in range(0, rows.shape[0], max(count, 1))]


def _rowdot(a: Tensor, b: Tensor) -> Tensor:
    """sum_v a_v b_v per row. A batched product of vectors is several times slower on CPU."""
    return (a * b).sum(-1)
