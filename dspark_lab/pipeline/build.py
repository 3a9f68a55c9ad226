"""From a node of the Hydra config to an object, with errors that name the config key."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.errors import InstantiationException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from dspark_lab.hardware.protocol import Floats, HardwareProfile
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
    config: DictConfig, hardware: HardwareProfile, *, temperatures: Floats | None = None
) -> VerifyScheduler:
    """A new scheduler of the group's choice, with the hardware's step times where it asks for them.

    ``temperatures`` [K] of a calibration are applied to the confidences that it is given.
    """
    asks = "hardware" in inspect.signature(get_class(config.scheduler._target_)).parameters
    made = build(config, "scheduler", hardware=hardware) if asks else build(config, "scheduler")
    return made if temperatures is None else Calibrated(made, temperatures)
