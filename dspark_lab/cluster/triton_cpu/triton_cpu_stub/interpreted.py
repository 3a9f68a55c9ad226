"""What Triton's interpreter lacks of the functions that vLLM's kernels call."""

from typing import Any

import numpy as np
from triton import language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]
from triton.runtime.interpreter import TensorHandle  # pyright: ignore[reportMissingImports]


def lend_log1p() -> None:
    """``libdevice``'s functions have no body before a compiler fills them in; the resampling after a rejection uses one."""
    libdevice.log1p = _log1p


def _log1p(x: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):  # of -1 and below: the kernel masks them
        return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)
