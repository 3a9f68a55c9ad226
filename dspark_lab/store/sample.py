"""What a store lets in and out: samples that fit the manifest and hold only finite numbers."""

import torch
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.store.protocol import Manifest, NonFiniteSampleError


def admitted(key: str, sample: TargetSample, *, manifest: Manifest) -> TargetSample:
    """A contiguous copy of ``sample`` on the CPU: ids int64, mask bool, states in the manifest's dtype.

    Raises ValueError for an empty key, no tokens or shapes that do not fit, NonFiniteSampleError for NaN and infinity.
    """
    require_fit(key, sample, manifest=manifest)
    copied = TargetSample(
        token_ids=_copied(sample.token_ids, torch.int64),
        loss_mask=_copied(sample.loss_mask, torch.bool),
        hidden_states=_copied(sample.hidden_states, manifest.torch_dtype),
        last_hidden_state=_copied(sample.last_hidden_state, manifest.torch_dtype),
    )
    require_finite(key, copied)
    return copied


def require_fit(key: str, sample: TargetSample, *, manifest: Manifest) -> None:
    """Raises ValueError for an empty key, no tokens, or shapes that the manifest does not have."""
    if not key:
        raise ValueError("key='': a sample needs a key; TokenizedConversation.key is its content address.")
    problem = misfit(sample, manifest=manifest)
    if problem:
        raise ValueError(f"sample {key!r}: {problem}. Capture with the settings that the store was made for.")


def misfit(sample: TargetSample, *, manifest: Manifest) -> str | None:
    """In what the shapes of ``sample`` differ from [T], [T], [T, L, H], [T, H] with T >= 1; None if in nothing."""
    num_tokens = sample.token_ids.numel()
    if num_tokens == 0:
        return "it has no tokens"
    wanted = {
        "token_ids": (num_tokens,),
        "loss_mask": (num_tokens,),
        "hidden_states": (num_tokens, len(manifest.layer_ids), manifest.hidden_size),
        "last_hidden_state": (num_tokens, manifest.hidden_size),
    }
    wrong = [
        f"{name} is {list(getattr(sample, name).shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if tuple(getattr(sample, name).shape) != shape
    ]
    return ", ".join(wrong) or None


def require_finite(key: str, sample: TargetSample) -> None:
    """Raises NonFiniteSampleError that names the key and the tensor."""
    for name in ("hidden_states", "last_hidden_state"):
        if not is_finite(getattr(sample, name)):
            raise NonFiniteSampleError(
                f"sample {key!r}: {name} contains NaN or infinity. Leave this conversation out and count it; if "
                "there are many, run the target in bfloat16 or float32 instead of float16."
            )


def is_finite(states: Tensor) -> bool:
    """Of a tensor that is not empty."""
    # Minimum and maximum carry NaN and infinity; 40 times faster than isfinite().all() in bf16.
    return bool(torch.isfinite(torch.stack(torch.aminmax(states))).all())


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # copy=True: the caller may fill its buffer again, or the tensor may be a small view that keeps a whole batch alive.
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
