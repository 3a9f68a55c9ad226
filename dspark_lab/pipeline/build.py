"""From a node of the Hydra config to an object, with errors that name the config key."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from dspark_lab.evaluation.calibration import read_temperatures
from dspark_lab.hardware.protocol import HardwareProfile
from dspark_lab.records import ConfidenceSource
from dspark_lab.scheduler.calibrated import Calibrated
from dspark_lab.scheduler.protocol import VerifyScheduler


def build(config: DictConfig, key: str, *, without: Sequence[str] = (), **extra: Any) -> Any:
    """Instantiate the node at ``key`` (dots lead deeper). Errors name the config key.

    ``without``: keys of the node that are not the constructor's but the pipeline's.

    Raises:
        ValueError: the constructor refused a value.
    """
    try:
        node: Any = OmegaConf.select(config, key)
        if without:
            values: Any = OmegaConf.to_container(node, resolve=True)
            node = {name: value for name, value in values.items() if name not in without}
        made: Callable[..., Any] = hydra.utils.instantiate(node, _convert_="all", _partial_=True)
        return made(**extra)
    except ValidationError as error:
        problems = [
            f"{key}.{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ValueError("; ".join(problems)) from error
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(f"{str(error).rsplit('full_key: ', 1)[-1] or key}: {cause}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def build_scheduler(
    config: DictConfig, hardware: HardwareProfile, *, calibration: Path | None = None
) -> VerifyScheduler:
    """A new scheduler of the group's choice, with the hardware's step times where it asks for them.

    The temperatures of ``calibration`` are applied to the confidences that it is given.

    Raises:
        ValueError: they are of other confidences than it asks for.
    """
    asks = asks_for_step_times(config)
    made: VerifyScheduler = build(config, "scheduler", hardware=hardware) if asks else build(config, "scheduler")
    if calibration is None or made.confidence in (None, "acceptance"):
        return made
    return Calibrated(made, read_temperatures(calibration, made.confidence))


def asks_for_step_times(config: DictConfig) -> bool:
    """Whether the scheduler decides by the hardware's step times."""
    return "hardware" in inspect.signature(get_class(config.scheduler._target_)).parameters


def confidence_source(config: DictConfig) -> ConfidenceSource:
    """What stages that know no scheduler take for confidences: the run's scheduler's, else the head's."""
    return config.scheduler.get("confidence", "head")
