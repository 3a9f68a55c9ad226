"""An exported drafter: a folder of the speculators format with a model card, whole or absent."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_lab.store.durable import is_full, sync_path
from dspark_lab.store.protocol import DTYPES
from dspark_lab.validation import checked

WEIGHTS, CONFIG, MODEL_CARD, RUN_CARD = "model.safetensors", "config.json", "README.md", "run_card.json"


class Export:
    """How a drafter is written. ``include_target_tensors``: embedding and head too, for a file that needs no target.

    ``serve_arguments``: of vLLM, in the model card's line that serves it; ``force``: what an engine cannot serve is served
    all the same, if ``serve`` is among the stages.
    """

    @checked
    def __init__(
        self,
        *,
        dtype: Literal["bfloat16", "float32"],
        include_target_tensors: bool,
        serve_arguments: tuple[str, ...],
        force: bool,
    ) -> None:
        self.dtype, self.include_target_tensors, self.force = dtype, include_target_tensors, force
        self.serve_arguments = serve_arguments

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model_card: str,
    run_card: Mapping[str, Any],
) -> int:
    """Write everything beside ``folder``, then put it in its place; an earlier export is replaced. Returns its bytes.

    Raises:
        ValueError: something that is no export is in the place, or the disk is full; nothing is left behind.
    """
    if folder.exists() and not (folder / RUN_CARD).is_file():
        raise ValueError(f"{folder} exists and is no earlier export (it has no {RUN_CARD}): move it away")
    staged, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    for leftover in (staged, old):  # of a killed run
        shutil.rmtree(leftover, ignore_errors=True)
    staged.mkdir(parents=True)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        save_file(dict(tensors), staged / WEIGHTS, metadata={"format": "pt"})
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staged / MODEL_CARD).write_text(model_card, encoding="utf-8")
        (staged / RUN_CARD).write_text(json.dumps(run_card, indent=2, default=str) + "\n", encoding="utf-8")
        for file in staged.iterdir():
            sync_path(file)
    except Exception as error:
        shutil.rmtree(staged, ignore_errors=True)
        if not is_full(error):
            raise
        raise ValueError(
            f"{folder}: the disk is full ({num_bytes:,} bytes are needed, {shutil.disk_usage(folder.parent).free:,} free): "
            "free some space or set run.root to another disk; an earlier export is untouched"
        ) from error
    if folder.exists():
        folder.rename(old)
    staged.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return num_bytes
