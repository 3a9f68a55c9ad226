"""What ``+rehearse=`` changes of an experiment: the same command is composed once more without it, and compared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from omegaconf import OmegaConf
from rich.table import Table

OVERLAY = "+rehearse="
TEXTS = frozenset({"about", "expect"})


@dataclass(frozen=True, slots=True)
class Replaced:
    """One key that the rehearsal has set otherwise; of a group of which it chose another option, the option alone."""

    key: str
    experiment: Any
    rehearsal: Any


def replaced(config_name: str, overrides: Sequence[str]) -> list[Replaced]:
    """The differences between ``overrides`` with and without the rehearsal; Hydra must be initialised.

    Raises:
        ValueError: the rehearsal is of a drafter with another kind of attention.
    """
    without, there = _composed(config_name, [each for each in overrides if not each.startswith(OVERLAY)])
    within, here = _composed(config_name, overrides)
    if _is_latent(without) != _is_latent(within):
        ways = ("without", "with") if _is_latent(without) else ("with", "without")
        raise ValueError(
            f"rehearse={here.get('rehearse')} is of a drafter {ways[0]} latent attention, the experiment is {ways[1]}: "
            "+rehearse=cpu_dspark_mla is the rehearsal of latent attention, cpu that of DSpark without"
        )
    groups = [
        Replaced(group, there.get(group), here.get(group))
        for group in sorted(there | here)
        if group != "rehearse" and there.get(group) != here.get(group)
    ]
    told = tuple(f"{each.key.replace('/', '.')}." for each in groups)
    keys = [each for each in _differences(without, within) if not f"{each.key}.".startswith(told)]
    return [*groups, *(each for each in keys if each.key not in TEXTS)]


def table_of(found: Sequence[Replaced]) -> Table:
    table = Table("key", "experiment", "rehearsal", title="Rehearsed: the experiment with these replaced")
    for each in found:
        table.add_row(each.key, _told(each.experiment), _told(each.rehearsal))
    return table


def _composed(config_name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values as written: an interpolation is compared as such, so that a changed fact is named once."""
    config = compose(config_name, list(overrides), return_hydra_config=True)
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    values: Any = OmegaConf.to_container(config, resolve=False)
    return {key: value for key, value in values.items() if key != "hydra"}, choices


def _is_latent(config: Mapping[str, Any]) -> bool:
    return "kv_lora_rank" in (config["drafter"].get("attention") or {})


def _differences(before: Any, after: Any, key: str = "") -> Iterator[Replaced]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from _differences(before.get(name), after.get(name), f"{key}.{name}" if key else str(name))
    elif before != after:
        yield Replaced(key, before, after)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_told(each)}" for name, each in value.items())
    return "–" if value is None else str(value)
