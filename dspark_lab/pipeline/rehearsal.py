"""What ``+rehearse=`` changes of an experiment: the same command is composed once more without it, and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.table import Table

OVERLAY = "+rehearse="
TEXTS = frozenset({"about", "expect"})


@dataclass(frozen=True, slots=True)
class Replaced:
    """One key that the rehearsal has set otherwise; of a group of which it chose another option, the option alone."""

    key: str
    experiment: Any
    rehearsal: Any


def rehearsed(overrides: Sequence[str]) -> bool:
    return any(override.startswith(OVERLAY) for override in overrides)


def replaced(config_name: str, overrides: Sequence[str]) -> list[Replaced]:
    """The differences between ``overrides`` with and without the rehearsal; needs Hydra to be initialised."""
    without, there = _composed(config_name, [each for each in overrides if not each.startswith(OVERLAY)])
    within, here = _composed(config_name, overrides)
    groups = [
        Replaced(group, there.get(group), here.get(group))
        for group in sorted(there | here)
        if group != "rehearse" and there.get(group) != here.get(group)
    ]
    covered = tuple(f"{each.key.replace('/', '.')}." for each in groups)
    before, after = _leaves(without), _leaves(within)
    keys = [
        Replaced(key, before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not f"{key}.".startswith(covered) and key not in TEXTS
    ]
    return [*groups, *keys]


def table_of(found: Sequence[Replaced]) -> Table:
    table = Table("key", "experiment", "rehearsal", title="Rehearsed: the experiment with these replaced")
    for each in found:
        table.add_row(each.key, _told(each.experiment), _told(each.rehearsal))
    return table


def _composed(config_name: str, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[str, str]]:
    config = compose(config_name, list(overrides), return_hydra_config=True)
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    with open_dict(config):
        del config["hydra"]
    return config, choices


def _leaves(config: DictConfig) -> dict[str, Any]:
    """Key with dots -> value as written: an interpolation is compared as such, so a changed fact is named once."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found


def _told(value: Any) -> str:
    return "–" if value is None else str(value)
