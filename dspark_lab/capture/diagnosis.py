"""Why a server's states are not what training takes them for: from one prompt that it captured, the likely cause."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.target.protocol import TargetHead

SAME_LOGPROB = 0.3  # of the engine's best token: bf16 logits of 20 are 0.06 apart, those of other states by far more
NEAR_TIE = 0.3
SHARE = 0.9  # of the positions, for what rounding may change at some


@dataclass(frozen=True, slots=True)
class Observation:
    """One prompt of a server. ``best`` int64 [T] and ``logprobs`` fp32 [T]: its own most likely next tokens."""

    alone: TargetSample
    together: TargetSample  # captured while others were
    best: Tensor
    logprobs: Tensor


def find_fault(
    seen: Observation, *, head: TargetHead, layer_ids: Sequence[int], reference: Tensor | None, tolerance: float
) -> str | None:
    """What is wrong with a server, and why, as far as one prompt can tell; None when nothing is.

    ``reference`` [T, n + 1, H]: states entering each of the n layers, and after the last, before the final norm.
    """
    states, last = seen.alone.hidden_states.float(), seen.alone.last_hidden_state.float()
    every = torch.cat([states, last[:, None]], dim=1)
    if not every.isfinite().all():
        return "its states are not finite: run it in bfloat16 or float32 instead of float16"
    if len(last) > 2 and bool((last[1:] == last[:-1]).all(-1).float().mean() > 0.5):
        return (
            "most of its rows are alike: they were never written. Likely cause: block size mismatch (the connector reads "
            "other slots of the cache than vLLM has filled), or prefix caching is on"
        )
    if reference is not None:
        fault = _unlike_reference(every, reference.to(every.device).float(), head, layer_ids, tolerance)
        if fault:
            return fault
    return _unlike_logits(last, seen, head) or _unlike_itself(every, seen.together, tolerance)


def _unlike_reference(
    every: Tensor, reference: Tensor, head: TargetHead, layer_ids: Sequence[int], tolerance: float
) -> str | None:
    num_layers = reference.shape[1] - 1
    wanted = [*layer_ids, num_layers]
    errors = [_row_errors(every[:, index], reference[:, layer]) for index, layer in enumerate(wanted)]
    wrong = [index for index, found in enumerate(errors) if bool((found > tolerance).any())]
    if not wrong:
        return None
    matching = [_matching_layer(every[:, index], reference, tolerance) for index in range(len(wanted))]
    shifts = {found - layer for found, layer in zip(matching[:-1], layer_ids, strict=True) if found is not None}
    if None not in matching[:-1] and len(shifts) == 1 and shifts != {0}:
        return (
            f"its layer ids are shifted by {shifts.pop():+d}: asked for the states entering layers {list(layer_ids)}, it "
            f"gave those entering {matching[:-1]}. Likely cause: its eagle_aux_hidden_state_layer_ids count outputs of "
            "layers; they are to name the layer that a state enters"
        )
    index = wrong[0]
    layer, state = wanted[index], every[:, index]
    about = "the last state" if layer == num_layers else f"the state entering layer {layer}"
    found = matching[index]
    if found is not None and found != layer:
        cause = f"it is the one entering layer {found}"
        if layer == num_layers:
            cause += f": last layer missing; the last of eagle_aux_hidden_state_layer_ids has to be {num_layers}"
        return f"{about} is another one: {cause}"
    if layer == num_layers and _is_normed(state, head):
        return f"{about} is already normed: it has to be captured before the final norm"
    for shift, told in ((1, "later"), (-1, "earlier")):
        ours, theirs = (state[1:], reference[:-1, layer]) if shift > 0 else (state[:-1], reference[1:, layer])
        if len(ours) and _mostly(_row_errors(ours, theirs) <= tolerance):
            return f"{about} stands one position {told} than its token: the rows are shifted by one"
    bad = errors[index] > tolerance
    worst = float(errors[index].max())
    return (
        f"{about} differs from a forward in this process at {int(bad.sum())} of {len(bad)} tokens, by up to {worst:.2g} "
        + (f"of its length. Likely cause: {_where(bad)}")
    )


def _unlike_logits(last: Tensor, seen: Observation, head: TargetHead) -> str | None:
    def agree(states: Tensor, best: Tensor, logprobs: Tensor) -> Tensor:
        ours = head.logits(states).float().log_softmax(-1)
        at_best = ours.gather(-1, best[:, None])[:, 0]
        return (at_best >= ours.amax(-1) - NEAR_TIE) & ((at_best - logprobs).abs() <= SAME_LOGPROB)

    if _is_normed(last, head):
        return "the last state is already normed: it has to be captured before the final norm"
    place, dtype = head.lm_head.device, head.lm_head.dtype
    states, best, logprobs = last.to(place, dtype), seen.best.to(place), seen.logprobs.to(place)
    same = agree(states, best, logprobs)
    if _mostly(same):
        return None
    told = f"head(norm(last state)) gives the engine's own next token at {int(same.sum())} of {len(same)} positions. "
    if len(same) > 1 and _mostly(agree(states[1:], best[:-1], logprobs[:-1])):
        return told + "Likely cause: the rows are shifted by one position"
    return told + (
        "Likely cause: last layer missing (the last of eagle_aux_hidden_state_layer_ids has to be the number of layers), or "
        "the server has other weights than this target"
    )


def _is_normed(last: Tensor, head: TargetHead) -> bool:
    """Whether all rows, divided by the norm's weight, have length sqrt(H). Logits need not tell that."""
    scaled = last / head.norm_weight.to(last.device).float().clamp_min(1e-6)
    return bool(((scaled.square().mean(-1).sqrt() - 1).abs() < 0.02).all())


def _unlike_itself(every: Tensor, together: TargetSample, tolerance: float) -> str | None:
    again = torch.cat([together.hidden_states, together.last_hidden_state[:, None]], dim=1).float()
    bad = (_row_errors(again, every) > tolerance).any(-1)
    if not bad.any():
        return None
    count = f"{int(bad.sum())} of {len(bad)}"
    return f"captured again, among others, {count} tokens have other states. Likely cause: {_where(bad)}"


def _where(bad: Tensor) -> str:
    """A cause that fits the positions [T] that are wrong."""
    first, last = int(bad.nonzero()[0]), int(bad.nonzero()[-1])
    if bad[: last + 1].all() and last + 1 < len(bad):
        return f"prefix caching is on (the first {last + 1} tokens are wrong): start it with --no-enable-prefix-caching"
    if first and first % 8 == 0:
        return (
            f"block size mismatch, or prompts in chunks (wrong from token {first} on): the connector reads other slots of "
            "the cache than vLLM has filled"
        )
    return "other weights, another dtype or a quantised target (engine.probe.tolerance)"


def _matching_layer(state: Tensor, reference: Tensor, tolerance: float) -> int | None:
    """The layer whose entering state [T, n + 1, H] this [T, H] is; None if it is none."""
    errors = _row_errors(state[:, None], reference).median(0).values
    best = int(errors.argmin())
    return best if errors[best] <= tolerance else None


def _row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """[..., H] -> [...]: distance relative to the length of ``wanted``."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)


def _mostly(flags: Tensor) -> bool:
    return bool(flags.float().mean() >= SHARE)
