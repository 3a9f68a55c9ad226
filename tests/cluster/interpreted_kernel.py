"""A kernel that calls ``libdevice.log1p``, interpreted: prints its results. A file, as Triton reads the source."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
import triton.language.extra.libdevice as libdevice  # pyright: ignore[reportMissingImports]
from triton_cpu_stub.interpreted import lend_log1p  # pyright: ignore[reportMissingImports]


@triton.jit
def kernel(x_ptr, y_ptr):
    offsets = tl.arange(0, 4)
    tl.store(y_ptr + offsets, libdevice.log1p(tl.load(x_ptr + offsets)))


if __name__ == "__main__":
    lend_log1p()
    x, y = torch.tensor([-0.75, -1e-6, 0.0, 3.0]), torch.empty(4)
    kernel[(1,)](x, y)
    print(y.tolist())
