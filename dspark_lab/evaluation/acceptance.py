"""How many draft tokens the target accepts: pure functions over traces, and the torchmetrics that training logs.

The accounting is that of ``Trace``: the first new token comes from prefill; a verify step emits its accepted draft
tokens and the bonus token, cut after the first EOS and at ``max_new_tokens``; ``num_accepted`` = emitted - 1. So 1 +
accepted / steps is exactly the emitted tokens per verify step, and the cut last step of an answer counts as a rejection
at the cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from numpy.typing import NDArray
from torch import Tensor

from dspark_lab.evaluation.bootstrap import Ratios, bootstrap_ratios
from dspark_lab.records import Metric, Trace
from dspark_lab.report.vocabulary import metric


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts of P prompts at K draft positions (K = the widest proposal seen); column k - 1 belongs to position k."""

    steps: NDArray[np.int64]  # [P] verify steps
    accepted: NDArray[np.int64]  # [P] accepted draft tokens
    drafted: NDArray[np.int64]  # [P] offered draft tokens
    reached: NDArray[np.int64]  # [P, K] steps in which the first k draft tokens were accepted
    offered: NDArray[np.int64]  # [P, K] steps that drafted >= k tokens and in which the first k - 1 were accepted


def count_acceptance(traces: Sequence[Trace]) -> AcceptanceCounts:
    """Counts per prompt and position.

    Raises:
        ValueError: no traces.
    """
    if not traces:
        raise ValueError("no traces to count acceptance over: evaluate at least one prompt")
    steps = np.array([len(trace.steps) for trace in traces], np.int64)
    prompt = np.repeat(np.arange(len(traces)), steps)
    accepted = np.array([step.num_accepted for trace in traces for step in trace.steps], np.int64)
    drafted = np.array([step.num_draft_tokens for trace in traces for step in trace.steps], np.int64)
    assert (accepted <= drafted).all(), "a verify step accepted more tokens than were drafted"
    position = np.arange(1, 1 + int(drafted.max(initial=0)))
    reached = accepted[:, None] >= position
    offered = (accepted[:, None] >= position - 1) & (drafted[:, None] >= position)

    def per_prompt(values: NDArray[Any]) -> NDArray[np.int64]:
        total = np.zeros((len(traces), *values.shape[1:]), np.int64)
        np.add.at(total, prompt, values)
        return total

    return AcceptanceCounts(steps, per_prompt(accepted), per_prompt(drafted), per_prompt(reached), per_prompt(offered))


def acceptance_length(traces: Sequence[Trace]) -> float:
    """1 + accepted / verify steps over all prompts (ratio of sums, not mean of ratios); NaN without a verify step."""
    counts = count_acceptance(traces)
    return 1 + float(_ratio(counts.accepted.sum(), counts.steps.sum()))


def acceptance_rates(traces: Sequence[Trace]) -> NDArray[np.float64]:
    """[K] unconditional: steps that accepted the first k draft tokens / all steps. Sum + 1 = acceptance length.

    The denominator is every step, also one that drafted fewer than k tokens (as in vLLM; DeepSpec leaves those out).
    """
    counts = count_acceptance(traces)
    return _ratio(counts.reached.sum(0), counts.steps.sum())


def conditional_acceptance_rates(traces: Sequence[Trace]) -> NDArray[np.float64]:
    """[K] given the prefix: accepted k / steps that drafted k tokens and accepted k - 1; NaN where none got there."""
    counts = count_acceptance(traces)
    return _ratio(counts.reached.sum(0), counts.offered.sum(0))


def acceptance_metrics(
    traces: Sequence[Trace], *, setting: Mapping[str, Any], origin: str, seed: int = 0, num_resamples: int = 2000
) -> list[Metric]:
    """All acceptance numbers of one evaluation, with 95 % intervals by bootstrap over its prompts.

    Names: ``acceptance_length``, ``acceptance_rate_<k>``, ``conditional_acceptance_rate_<k>`` for k = 1..K, the counts
    ``num_prompts``, ``num_verify_steps``, ``num_new_tokens``, ``num_drafted_tokens`` (see ``report/vocabulary.py``).

    Args:
        setting: what the numbers depend on (temperature, num_draft_tokens, engine, dtype, prompts ...).
        origin: "measured" for real decoding, "replayed" for replay.
    """
    counts = count_acceptance(traces)
    steps = np.broadcast_to(counts.steps[:, None], counts.reached.shape)
    ratios = bootstrap_ratios(
        np.concatenate([counts.accepted[:, None], counts.reached, counts.reached], axis=1),
        np.concatenate([counts.steps[:, None], steps, counts.offered], axis=1),
        num_resamples=num_resamples,
        seed=seed,
    )
    positions = range(1, 1 + counts.reached.shape[1])
    names = ["acceptance_length"]
    names += [f"acceptance_rate_{k}" for k in positions] + [f"conditional_acceptance_rate_{k}" for k in positions]
    totals = {
        "num_prompts": len(traces),
        "num_verify_steps": int(counts.steps.sum()),
        "num_new_tokens": sum(trace.num_new_tokens for trace in traces),
        "num_drafted_tokens": int(counts.drafted.sum()),
    }
    return _ratio_metrics(names, ratios, setting=setting, origin=origin, num_prompts=len(traces)) + [
        metric(name, total, origin=origin, setting=setting, num_samples=len(traces)) for name, total in totals.items()
    ]


def acceptance_length_estimate(agreement: Tensor, mask: Tensor) -> Tensor:
    """Teacher-forced estimate: mean over blocks of 1 + sum of prefix products of ``agreement & mask``; a 0-d tensor.

    Blocks without a valid slot are left out; NaN when none is left. A block cut by the document's end counts what it
    has, so the estimate is a little low for short documents.

    Args:
        agreement: bool [A, B], the drafter's arg-max equals the target's.
        mask: bool [A, B], False for slots outside the document or the answer.
    """
    total, blocks = _estimate_sums(agreement, mask)
    return total / blocks


class AcceptanceLength(torchmetrics.Metric):
    """``acceptance_length`` accumulated over batches and ranks: ``update(traces)``; NaN without a verify step."""

    full_state_update = False
    accepted: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("accepted", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("steps", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, traces: Sequence[Trace]) -> None:
        self.accepted += sum(trace.num_accepted for trace in traces)
        self.steps += sum(len(trace.steps) for trace in traces)

    def compute(self) -> Tensor:
        return 1 + self.accepted / self.steps


class AcceptanceLengthEstimate(torchmetrics.Metric):
    """``acceptance_length_estimate`` accumulated over batches and ranks: ``update(agreement, mask)``, bool [A, B]."""

    full_state_update = False
    total: Tensor
    blocks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("blocks", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, agreement: Tensor, mask: Tensor) -> None:
        total, blocks = _estimate_sums(agreement, mask)
        self.total += total
        self.blocks += blocks

    def compute(self) -> Tensor:
        return (self.total / self.blocks).float()


def _estimate_sums(agreement: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    products = (agreement & mask).long().cumprod(-1)
    valid = mask.any(-1)
    # Products of a block without valid slots are 0, so only its "1 +" has to be left out.
    return (products.sum() + valid.sum()).float(), valid.sum().float()


def _ratio(top: NDArray[np.int64], bottom: NDArray[np.int64]) -> NDArray[np.float64]:
    top, bottom = np.broadcast_arrays(top, bottom)
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)


def _ratio_metrics(
    names: Sequence[str], ratios: Ratios, *, setting: Mapping[str, Any], origin: str, num_prompts: int
) -> list[Metric]:
    def known(value: float, shift: float) -> float | None:
        return None if np.isnan(value) else float(value) + shift

    made = []
    for name, value, low, high in zip(names, ratios.value, ratios.low, ratios.high, strict=True):
        shift = 1.0 if name == "acceptance_length" else 0.0
        made.append(
            metric(
                name,
                known(value, shift),
                origin=origin,
                setting=setting,
                num_samples=num_prompts,
                low=known(low, shift),
                high=known(high, shift),
            )
        )
    return made
