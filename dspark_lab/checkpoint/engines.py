"""What inference engines do with our checkpoints: what they cannot serve, and the line that starts one."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from dspark_lab.checkpoint.description import Description, describe, formats
from dspark_lab.drafter.base import Drafter

VLLM_VERSION = "0.32"  # whose sources say the following


def unservable(drafter: Drafter) -> list[str]:
    """What of ``drafter`` vLLM cannot serve, one sentence each with the mend; empty: it serves all of it."""
    found = describe(drafter)
    reduced = not drafter.vocabulary.is_full
    return unservable_options(found.algorithm, found.options, found.layers.rope_parameters, reduced=reduced)


def unservable_options(
    algorithm: str, options: Mapping[str, Any], rope_parameters: Mapping[str, Any], *, reduced: bool
) -> list[str]:
    """The same from the config's ``drafter`` node, before anything is trained. ``reduced``: it has a draft vocabulary."""
    known, said = formats()[algorithm], []
    if known.full_vocabulary and reduced:
        said.append(
            f"{algorithm} with a draft vocabulary: vLLM {VLLM_VERSION} would take its draft ids for the target's; train "
            "with data.draft_vocab_size=null"
        )
    if algorithm == "dspark" and options["markov"] != "vanilla":
        said.append(
            f"markov={options['markov'] or 'null'}: vLLM {VLLM_VERSION} computes the vanilla Markov head only; "
            "train with drafter.markov=vanilla"
        )
    if known.method == "dflash" and options["sample_from_anchor"]:
        said.append(
            f"{algorithm} with sample_from_anchor=true: vLLM {VLLM_VERSION} serves DFlash in the layout 1 + N only; train "
            "with drafter.sample_from_anchor=false, or drafter=dspark for the anchor-first layout"
        )
    window = options["window"]
    if known.method == "dflash" and window is not None and window["causal"] and window["full_layers"]:
        said.append(
            f"{algorithm} with a causal window and full_layers={list(window['full_layers'])}: vLLM {VLLM_VERSION} has one "
            "causal flag for all layers; train with window.causal=false or window.full_layers=[]"
        )
    odd = [key for key in ("partial_rotary_factor", "mrope_section") if rope_parameters.get(key) not in (None, 1.0)]
    if odd:
        said.append(
            f"rope_parameters has {', '.join(odd)}: engines would rotate other dimensions than the drafter was trained with"
        )
    return said


def cpu_faults(algorithm: str, options: Mapping[str, Any]) -> list[str]:
    """Where vLLM's CPU engine computes something else than its GPU engine: small differences there are its own."""
    if algorithm == "eagle3" or options["num_layers"] == 1:
        return []
    return [
        f"vLLM {VLLM_VERSION}'s CPU engine norms the context's keys of every layer with the first layer's k_norm "
        f"(num_layers={options['num_layers']}): it accepts a little more or less than is right"
    ]


def needs_newer_runner(algorithm: str, options: Mapping[str, Any]) -> bool:
    """Whether only vLLM's newer model runner has it; two kinds of layers in DFlash need two groups of caches."""
    known, window = formats()[algorithm], options["window"]
    return known.newer_runner or (known.method == "dflash" and window is not None and bool(window["full_layers"]))


def speculative_config(description: Description, *, folder: str, num_draft_tokens: int) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` for the drafter in ``folder``; it drafts greedily unless told otherwise."""
    return {
        "model": folder,
        "num_speculative_tokens": num_draft_tokens,
        "method": formats()[description.algorithm].method,
    }


def serve_command(description: Description, *, target: str, folder: str) -> str:
    """The shell line that serves ``target`` with the drafter in ``folder``."""
    speculative = speculative_config(description, folder=folder, num_draft_tokens=description.num_draft_tokens)
    if description.algorithm == "dspark":
        speculative |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    # vLLM chooses the newer runner by itself where only that has the algorithm at all.
    chosen = formats()[description.algorithm].newer_runner
    mixed = not chosen and needs_newer_runner(description.algorithm, description.options)
    return ("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "") + shlex.join(command)
