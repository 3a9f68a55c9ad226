"""Published checkpoints with published numbers: what measuring them needs, and ours beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark_lab.evaluation.published import compare_published
from dspark_lab.nothere import Missing, NotHere
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.records import Metric, Trace
from dspark_lab.report.vocabulary import metric

HUB_TIMEOUT_S = 3.0


def require_what_was_published(parts: Parts) -> None:
    """Print what is to be measured; NotHere without a GPU, or where target or checkpoint cannot be had."""
    assert parts.published is not None
    config, sampling = parts.config, parts.evaluation.sampling
    target, drafter = str(config.target.model), str(config.drafter.from_pretrained)
    console.print(
        f"plan: {drafter} drafts for {target}: {parts.benchmark.name}, up to {parts.evaluation.num_decode_prompts} prompts, "
        f"temperature {sampling.temperature:g}, {parts.evaluation.num_draft_tokens} draft tokens, {sampling.max_new_tokens} "
        f"new tokens, seed {parts.evaluation.seed}; published ({parts.published.source}):"
    )
    for domain, length in parts.published.acceptance_length.items():
        console.print(f"  {domain} {length:.2f}")
    missing = [found for name, key in ((target, "target.model"), (drafter, "drafter.from_pretrained"))
               if (found := unobtainable(name, key))]  # fmt: skip
    if not torch.cuda.is_available():
        missing.append(Missing("a CUDA GPU", f"run the same command where one holds {target} in bf16"))
    if missing:
        raise NotHere(f"the reproduction of {drafter}", missing)


def unobtainable(name: str, key: str) -> Missing | None:
    """Why a folder or hub repository cannot be had; nothing is fetched."""
    from huggingface_hub import HfApi, snapshot_download

    if Path(name).expanduser().is_dir():
        return None
    try:
        snapshot_download(name, local_files_only=True)
    except Exception:  # the hub's client raises another family of errors in each of its major versions
        try:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return Missing(f"{name}: {reason}", f"connect to the hub, or set {key} to a folder that holds it")
    return None


def beside_published(parts: Parts, traces: Sequence[Trace], setting: Mapping[str, Any]) -> list[Metric]:
    """Print ours beside what was published, with the verdict of each domain, and return both as metrics."""
    assert parts.published is not None
    console.print(f"published: {parts.published.source}")
    metrics = []
    for found in compare_published(traces, parts.published, seed=parts.evaluation.seed):
        console.print(f"published: {found}")
        common: dict[str, Any] = {
            "origin": "measured",
            "setting": {**setting, "domain": found.domain, "source": parts.published.source},
            "num_samples": found.num_prompts,
        }
        metrics += [
            metric("reproduced_acceptance_length", found.ours, low=found.low, high=found.high, **common),
            metric("published_acceptance_length", found.published, **common),
            metric("published_agreement", float(found.agrees), **common),
        ]
    return metrics
