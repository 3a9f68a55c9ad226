"""Which device and dtype a target computes in."""

from typing import Literal

import torch

Dtype = Literal["auto", "float32", "bfloat16"]


def resolve_device(device: str) -> torch.device:
    """ "auto" is the current CUDA device where there is one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def has_bfloat16(device: torch.device) -> bool:
    """Whether bf16 matmuls run in hardware. Emulated on a CPU they are hundreds of times slower than fp32 ones."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
