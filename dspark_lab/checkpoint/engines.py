"""What inference engines do with our checkpoints: what they cannot serve, and the line that starts one."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_lab.checkpoint.description import Description, describe, formats
from dspark_lab.decoding.verification import Verification
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


def unservable_on_cpu(options: Mapping[str, Any]) -> list[str]:
    """The same of a vLLM that is started on a CPU."""
    if "kv_lora_rank" not in (options.get("attention") or {}):
        return []
    return [f"latent attention: vLLM {VLLM_VERSION}'s kernels of such layers need a GPU"]


def unservable_adaptively(algorithm: str, *, on_cpu: bool) -> list[str]:
    """Why vLLM cannot choose how many drafts to verify (``enable_adaptive_verification``)."""
    said = []
    if algorithm != "dspark":
        said.append(
            f"serve.num_draft_tokens=adaptive: vLLM {VLLM_VERSION} has enable_adaptive_verification for DSpark only"
        )
    if on_cpu:
        said.append(
            f"serve.num_draft_tokens=adaptive: vLLM {VLLM_VERSION}'s enable_adaptive_verification needs CUDA graphs, which "
            "a CPU has not"
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


def verification_faults(verification: Verification) -> list[str]:
    """Where vLLM verifies otherwise than its setting says, on GPUs too."""
    if verification == "token":
        return []
    return [
        f"vLLM {VLLM_VERSION} draws the random numbers of a position anew from the same seed in every step, and block "
        "verification has looked at those of the drafts that fell: after a rejection it accepts less than is right, and "
        "its text is not quite the target's"
    ]


def needs_newer_runner(algorithm: str, options: Mapping[str, Any], *, verification: Verification = "token") -> bool:
    """Whether only vLLM's newer model runner has it.

    Some algorithms; layers of two kinds in DFlash, which need two groups of caches; and block verification, which the
    older one ignores.
    """
    known, window = formats()[algorithm], options["window"]
    mixed = known.method == "dflash" and window is not None and bool(window["full_layers"])
    return known.newer_runner or mixed or verification == "block"


def speculative_config(
    description: Description,
    *,
    folder: str,
    num_draft_tokens: int,
    verification: Verification = "token",
    adaptive: bool = False,
) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` for the drafter in ``folder``; it drafts greedily but for block verification.

    ``adaptive``: the engine chooses by the confidences how many of its drafts it verifies (DSpark's alone).
    """
    found = {
        "model": folder,
        "num_speculative_tokens": num_draft_tokens,
        "method": formats()[description.algorithm].method,
    }
    if verification == "block":
        found |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    return found | ({"enable_adaptive_verification": True} if adaptive else {})


def card_verification(algorithm: str) -> Verification:
    """What the model card's commands ask for."""
    return "block" if algorithm == "dspark" else "token"


def serve_command(
    description: Description,
    *,
    target: str,
    folder: str,
    lengths: Sequence[tuple[int, int, int]] = (),
    arguments: Sequence[str] = (),
) -> str:
    """The shell line that serves ``target`` with the drafter in ``folder``; ``arguments`` are further ones of vLLM.

    ``lengths``: (first, last, draft tokens) of the requests in a step; none: always as many as it drafts.
    """
    speculative = speculative_config(
        description,
        folder=folder,
        num_draft_tokens=description.num_draft_tokens,
        verification=card_verification(description.algorithm),
    )
    if lengths:
        speculative["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in lengths]
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *arguments]
    # vLLM chooses the newer runner by itself where only that has the algorithm at all.
    chosen = formats()[description.algorithm].newer_runner
    mixed = not chosen and needs_newer_runner(description.algorithm, description.options)
    return ("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "") + shlex.join(command)


def untold(algorithm: str) -> list[str]:
    """What of our schedulers vLLM cannot be told, one sentence each."""
    said = [
        f"thresholds and step times: vLLM {VLLM_VERSION} takes neither; `enable_adaptive_verification` measures its own"
    ]
    if algorithm == "dspark":
        return [*said, "temperatures of calibration.json: it takes the confidence head's estimates as they are"]
    return said
