"""How much memory training took at its peak: of the GPU where there is one, else of this process."""

import re
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """What was before does not count: earlier stages, and earlier jobs of a sweep in this process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # resets the high-water mark of resident memory


def peak_bytes() -> int | None:
    """Since ``forget_peak``: allocated by torch on this GPU, or resident; None where the system does not say."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else None
