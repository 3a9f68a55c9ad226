"""How much arithmetic a training step is, and how much the device can do: the two sides of MFU, both measured."""

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

aten = torch.ops.aten

FORMULAS = {
    **flop_registry,
    # The counter of torch knows the kernels of GPUs only.
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class FlopCount(TorchDispatchMode):
    """``with FlopCount() as count: ...`` -> ``count.flops``, of matrix products and attention, backward passes included.

    ``torch.utils.flop_counter.FlopCounterMode`` without its bookkeeping by module, which fails where a forward pass computes
    gradients (``losses.walk_chunks``).
    Compiled kernels stay compiled under it and are not seen: on CUDA the scores of flex attention are not counted.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square matrix product on ``device``: the best of six. Takes less than a second."""
    size = 8192 if device.type == "cuda" else 768
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(_product_s(matrix) for _ in range(6))


def _product_s(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # waits for the device
    return time.perf_counter() - started
