"""Shipped hardware and targets, for tests."""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from dspark_lab.configs import config_folder
from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.hardware.served import ServedDrafter, ServedTarget

VALIDATION_TARGETS = Path(__file__).parents[2] / "experiments" / "serving_model" / "targets.yaml"
DATA_SHEETS = sorted(path.stem for path in (config_folder() / "hardware").glob("*.yaml") if path.stem != "measured")


def accelerator(name: str, **changes: Any) -> Accelerator:
    node = OmegaConf.load(config_folder() / "hardware" / f"{name}.yaml")
    return instantiate(OmegaConf.merge(node, changes), _convert_="all")


def served(name: str) -> ServedTarget:
    """Of conf/target, or of the validation."""
    known: Any = OmegaConf.to_container(OmegaConf.load(VALIDATION_TARGETS))
    if name in known:
        return ServedTarget(**known[name])
    return instantiate(OmegaConf.load(config_folder() / "target" / f"{name}.yaml").serving, _convert_="all")


def drafter(num_draft_tokens: int = 7, parameters: float = 5e9, **changes: Any) -> ServedDrafter:
    facts = {
        "name": "dspark",
        "num_draft_tokens": num_draft_tokens,
        "num_passes": 1,
        "parameters": parameters,
        "bytes_per_parameter": 2.0,
        "context_bytes_per_token": 0.0,
    }
    return ServedDrafter(**{**facts, **changes})
