"""The one vocabulary of metrics: name -> unit and definition. ``docs/results.md`` shows it; a test keeps them equal.

Names in ``results.json`` are checked against it (``metric``). A trailing ``_<k>`` stands for a 1-based draft position,
``<term>`` for a name that the drafter's loss gives to one of its terms.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_lab.records import Metric

ORIGINS: Mapping[str, str] = {
    "measured": "by running the thing itself: real speculative decoding, training, a store on disk",
    "replayed": "by walking recorded answers with their stored states, no target forward (`evaluate.mode=replay`)",
    "estimated": "from teacher-forced agreement, no walk at all",
    "simulated": "by a model of hardware or load, never by running on it",
}


@dataclass(frozen=True, slots=True)
class MetricKind:
    unit: str
    definition: str


METRICS: Mapping[str, MetricKind] = {
    # evaluate
    "acceptance_length": MetricKind(
        "tokens/step",
        "1 + accepted draft tokens / verify steps: tokens that one target forward yields, bonus token included. "
        "The first new token comes from prefill and is no verify step.",
    ),
    "acceptance_rate_<k>": MetricKind(
        "fraction",
        "Verify steps in which the first k draft tokens were accepted / all verify steps (unconditional). "
        "Their sum over k, plus 1, is the acceptance length.",
    ),
    "conditional_acceptance_rate_<k>": MetricKind(
        "fraction",
        "Verify steps in which the first k draft tokens were accepted / verify steps that drafted at least k tokens "
        "and in which the first k - 1 were accepted.",
    ),
    "acceptance_length_estimate": MetricKind(
        "tokens/step",
        "Mean over anchors of 1 + sum of prefix products of arg-max agreement, teacher-forced, cut at the document's "
        "end.",
    ),
    "num_prompts": MetricKind("prompts", "Prompts that were evaluated; the intervals resample these."),
    "num_verify_steps": MetricKind("steps", "Target forwards over draft tokens, summed over the prompts."),
    "num_new_tokens": MetricKind("tokens", "Tokens written, summed over the prompts, the first one of each included."),
    "num_drafted_tokens": MetricKind("tokens", "Draft tokens offered to verification, summed over the verify steps."),
    "greedy_mismatch_rate": MetricKind(
        "fraction",
        "Prompts whose speculative greedy answer differs from plain greedy decoding / prompts "
        "(in fp32 only exact ties of the two best logits can differ).",
    ),
    "loop_tokens_per_s": MetricKind(
        "tokens/s",
        "New tokens / seconds of speculative decoding in this package's own loop (batch 1), prefill included.",
    ),
    "loop_plain_tokens_per_s": MetricKind(
        "tokens/s",
        "The same for plain decoding of the same target, prompts and dtype, run alternately with the speculative loop.",
    ),
    "loop_speedup": MetricKind(
        "ratio", "loop_tokens_per_s / loop_plain_tokens_per_s of the same run. Says nothing about a serving engine."
    ),
    "batch_tokens_per_s": MetricKind(
        "tokens/s",
        "New tokens / seconds of decoding `batch_size` requests together under `scheduler` in this package's own loop "
        "(`evaluate.mode=batch`), prefill included; median over rounds.",
    ),
    "batch_plain_tokens_per_s": MetricKind("tokens/s", "The same for plain decoding of the same batches, in turn."),
    "batch_speedup": MetricKind(
        "ratio",
        "batch_tokens_per_s / batch_plain_tokens_per_s, median over rounds. Says nothing about a serving engine.",
    ),
    "batch_acceptance_length": MetricKind(
        "tokens/step", "1 + accepted draft tokens / verify steps of requests, of which few drafts may be verified."
    ),
    "batch_verified_tokens_per_step": MetricKind("tokens/step", "Draft tokens verified / verify steps of requests."),
    "batch_greedy_mismatch_rate": MetricKind(
        "fraction", "Prompts whose greedy answer differs from plain decoding's in the same batch / prompts."
    ),
    # calibrate
    "confidence_ece_<k>": MetricKind(
        "fraction",
        "Expected calibration error of the survival (product of the first k confidences) as probability that the first k "
        "draft tokens are accepted, on prompts held out from calibration.",
    ),
    "calibrated_ece_<k>": MetricKind("fraction", "confidence_ece_<k> after calibration."),
    "confidence_ece_floor_<k>": MetricKind(
        "fraction",
        "What calibrated_ece_<k> would be on average with so many rounds if the calibrated survivals were exactly right.",
    ),
    "confidence_brier_<k>": MetricKind(
        "fraction", "Mean squared difference of that survival and the outcome (0 or 1)."
    ),
    "calibrated_brier_<k>": MetricKind("fraction", "confidence_brier_<k> after calibration."),
    "confidence_auroc_<k>": MetricKind(
        "fraction",
        "Probability that the survival of a round whose first k draft tokens were accepted is higher than that of one "
        "where they were not. Undefined where one of the two never occurs.",
    ),
    "calibrated_auroc_<k>": MetricKind("fraction", "confidence_auroc_<k> after calibration."),
    "confidence_temperature_<k>": MetricKind(
        "ratio", "What the logit of confidence k is divided by: above 1, the drafter was too sure."
    ),
    # serve
    "served_acceptance_length": MetricKind(
        "tokens/step",
        "acceptance_length of the exported drafter in a serving engine, by the engine's own account of every verify step.",
    ),
    "served_acceptance_rate_<k>": MetricKind("fraction", "acceptance_rate_<k> in the serving engine."),
    "served_num_verify_steps": MetricKind("steps", "num_verify_steps in the serving engine."),
    "exported_acceptance_length": MetricKind(
        "tokens/step",
        "acceptance_length of the exported (rounded) weights in this package's own loop, over the prompts that were served; "
        "drafts and verification as the engine's.",
    ),
    "served_acceptance_difference": MetricKind(
        "tokens/step",
        "served_acceptance_length - exported_acceptance_length; the interval is that of the difference over the same "
        "prompts.",
    ),
    "served_agreement": MetricKind(
        "0 or 1",
        "1: the interval of served_acceptance_difference holds 0, or the difference is below 1 % of "
        "exported_acceptance_length.",
    ),
    "served_mismatch_rate": MetricKind(
        "fraction",
        "Prompts whose greedy answer from the engine, token for token, is not the target's plain greedy decoding here / "
        "prompts.",
    ),
    "served_tokens_per_s": MetricKind(
        "tokens/s",
        "New tokens of all requests / seconds from the first request to the last answer, prefill included. Undefined where "
        "the engine's kernels were interpreted.",
    ),
    "served_tokens_per_s_per_user": MetricKind(
        "tokens/s",
        "Tokens after each request's first / seconds that requests spent decoding. Undefined where kernels were "
        "interpreted.",
    ),
    "served_time_to_first_token_s": MetricKind(
        "s",
        "Median over the requests of the seconds from arrival to the first token, waiting included. Undefined where kernels "
        "were interpreted.",
    ),
    # published checkpoints
    "reproduced_acceptance_length": MetricKind(
        "tokens/step", "acceptance_length of a published drafter by real decoding here, over the prompts of one domain."
    ),
    "published_acceptance_length": MetricKind("tokens/step", "What its authors state for that domain."),
    "published_agreement": MetricKind(
        "0 or 1",
        "1: published_acceptance_length lies within sqrt(2) times the interval of reproduced_acceptance_length, or within "
        "1 % of it.",
    ),
    # profile
    "profile_step_time_s": MetricKind(
        "s", "Median seconds of the target's cached forward of one token, one request, on the machine at hand."
    ),
    "profile_draft_time_s": MetricKind(
        "s", "Median seconds of a proposal for the fewest requests (`profile.num_requests`) in the middle of decoding."
    ),
    "profile_fit_error": MetricKind(
        "fraction", "Mean over the timed steps of |fitted / timed - 1|: how well the stored profile says its own data."
    ),
    # simulate
    "simulated_tokens_per_s_per_user": MetricKind(
        "tokens/s",
        "Tokens after each request's first / seconds that requests spent decoding, in the window after the warm-up: one "
        "over the mean time per output token, weighted by tokens.",
    ),
    "simulated_output_tokens_per_s": MetricKind("tokens/s", "Tokens emitted by all requests / seconds, in the window."),
    "simulated_output_tokens_per_s_per_gpu": MetricKind(
        "tokens/s/GPU", "simulated_output_tokens_per_s / GPUs of the replica."
    ),
    "simulated_total_tokens_per_s_per_gpu": MetricKind(
        "tokens/s/GPU", "The same with the prompt tokens that were prefilled: what some published charts show."
    ),
    "simulated_acceptance_length": MetricKind(
        "tokens/step", "Tokens after each request's first / verify steps of requests; 1 without a drafter."
    ),
    "simulated_verified_tokens_per_step": MetricKind(
        "tokens/step", "Draft tokens verified / verify steps of requests: what the scheduler chose."
    ),
    "simulated_wasted_verification": MetricKind(
        "fraction", "Draft tokens that were verified and did not stand / draft tokens that were verified."
    ),
    "simulated_num_running": MetricKind("requests", "Requests that decode at once, averaged over time."),
    "simulated_time_to_first_token_s_p<k>": MetricKind(
        "s", "Percentile k over requests of the seconds from the client's asking to the first token."
    ),
    "simulated_time_per_output_token_s_p<k>": MetricKind(
        "s", "Percentile k over requests of (last token - first token) / (tokens - 1)."
    ),
    "simulated_request_time_s_p<k>": MetricKind(
        "s", "Percentile k over requests of the seconds from the client's asking to the last token."
    ),
    "simulated_gain": MetricKind(
        "ratio",
        "Output tokens/s/GPU of the scheduler's frontier / that of another at the other's point, at the same tokens/s/user; "
        "linear between the scheduler's points.",
    ),
    "simulated_gain_over_best_length": MetricKind(
        "ratio",
        "Rate of the scheduler / that of the best fixed number of draft tokens for the same load (0: no drafter). The rate "
        "is output tokens/s/GPU of a closed loop, tokens/s per user where arrivals are given.",
    ),
    "simulated_gain_over_one_length": MetricKind(
        "ratio",
        "The same over one fixed number for all loads, the one with the best product of its rates: part of it is what "
        "setting the number by the load would gain too.",
    ),
    # train
    "num_parameters": MetricKind(
        "parameters", "Trained parameters of the drafter (the target's matrices are not its)."
    ),
    "num_train_steps": MetricKind("steps", "Optimizer steps done."),
    "num_train_tokens": MetricKind("tokens", "Tokens of documents in the batches trained on, repeats counted."),
    "train_time_s": MetricKind("s", "Wall clock of training, validation included, summed over resumed parts."),
    "train_tokens_per_s": MetricKind(
        "tokens/s", "Tokens of documents trained on / seconds of training steps, validation excluded."
    ),
    "train_data_wait_share": MetricKind("fraction", "Share of the time of training steps that waited for a batch."),
    "train_flops": MetricKind(
        "FLOPs",
        "Of forward and backward passes on the first rank: matrix products and attention (on CUDA without the fused "
        "attention kernel), counted on one batch in sixteen.",
    ),
    "train_mfu": MetricKind(
        "fraction",
        "Model FLOPs utilisation: train_flops / what the device does in the same time in one large matrix product, "
        "measured when training starts.",
    ),
    "train_peak_memory_bytes": MetricKind(
        "bytes",
        "Most memory during this part of training, on the first rank: allocated by torch on the GPU, or, without one, "
        "resident in the process.",
    ),
    "best_val_acceptance_length": MetricKind(
        "tokens/step", "Highest val/acceptance_length of the run: the one by which `best` was chosen."
    ),
    # regenerate, capture
    "num_conversations": MetricKind("conversations", "Conversations that the stage passed on."),
    "num_supervised_tokens": MetricKind("tokens", "Tokens with loss mask 1 in the captured conversations."),
    "train_prompt_overlap": MetricKind(
        "fraction",
        "Training prompts that share 13 words in a row with a prompt of the benchmark / training prompts, before any "
        "is dropped for it.",
    ),
    "train_answer_overlap": MetricKind(
        "fraction",
        "Training conversations whose answer shares 13 words in a row with a prompt of the benchmark / training "
        "conversations, before any is dropped for it.",
    ),
    "regenerate_tokens_per_s": MetricKind(
        "tokens/s", "Answer tokens drawn by the target / seconds, from when the engine was ready."
    ),
    "capture_tokens_per_s": MetricKind(
        "tokens/s", "Tokens whose states were captured / seconds, from when the engine was ready."
    ),
    "stored_bytes": MetricKind("bytes", "Size of the captured states in the store."),
    "draft_vocabulary_coverage": MetricKind(
        "fraction", "Supervised tokens that lie in the draft vocabulary / supervised tokens."
    ),
    # curves: one line of metrics.jsonl each
    "train/loss": MetricKind(
        "loss", "The drafter's own objective. Objectives differ: never compare it across drafters."
    ),
    "train/<term>": MetricKind("term", "One term of the drafter's loss, as the drafter names it."),
    "train/tokens_per_s": MetricKind("tokens/s", "train_tokens_per_s since the line before."),
    "train/data_wait_share": MetricKind("fraction", "train_data_wait_share since the line before."),
    "train/mfu": MetricKind("fraction", "train_mfu since the line before."),
    "train/skipped_steps": MetricKind("steps", "Optimizer steps that the spike guard refused so far."),
    "val/loss": MetricKind("loss", "The objective on held-out conversations."),
    "val/<term>": MetricKind("term", "One term of the loss on held-out conversations."),
    "val/acceptance_length": MetricKind(
        "tokens/step", "acceptance_length by replay of a small, fixed number of held-out conversations."
    ),
    "val/decode_acceptance_length": MetricKind(
        "tokens/step", "acceptance_length by real greedy decoding of a few held-out prompts (callbacks/decode=default)."
    ),
    "val/acceptance_length_estimate": MetricKind(
        "tokens/step", "acceptance_length_estimate on the held-out conversations."
    ),
    "lr": MetricKind("1/step", "Learning rate of the first parameter group."),
    "step": MetricKind("steps", "Optimizer steps done when the line was written."),
    "epoch": MetricKind("epochs", "Number of the epoch, from 0."),
    "tokens": MetricKind("tokens", "Tokens trained on so far."),
    "time_s": MetricKind("s", "Wall clock of training so far, earlier parts of a resumed run included."),
}


def metric_kind(name: str) -> MetricKind:
    """Unit and definition of ``name`` (``acceptance_rate_3`` is found under ``acceptance_rate_<k>``).

    Raises:
        ValueError: the vocabulary has no such metric.
    """
    for key in (name, re.sub(r"_(p?)[1-9]\d*$", r"_\1<k>", name), re.sub(r"^(train|val)/.+$", r"\1/<term>", name)):
        if key in METRICS:
            return METRICS[key]
    near = difflib.get_close_matches(name, METRICS, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see docs/results.md"
    raise ValueError(f"metric name {name!r} is not in the vocabulary (report/vocabulary.py): {hint}")


def metric(
    name: str,
    value: float | None,
    *,
    origin: str,
    setting: Mapping[str, Any] | None = None,
    num_samples: int | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Metric:
    """A ``Metric`` whose unit comes from the vocabulary.

    Raises:
        ValueError: unknown name or origin, or a value that is NaN or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise ValueError(f"metric {name!r} is {value}: use None where it is not defined")
    if origin not in ORIGINS:
        raise ValueError(f"origin of metric {name!r} is {origin!r}: use one of {', '.join(ORIGINS)}")
    return Metric(name, value, metric_kind(name).unit, origin, dict(setting or {}), num_samples, low, high)


def vocabulary_markdown() -> str:
    """The table of ``docs/results.md``."""
    rows = [f"| `{name}` | {kind.unit} | {kind.definition} |" for name, kind in METRICS.items()]
    return "\n".join(["| name | unit | definition |", "|---|---|---|", *rows])
