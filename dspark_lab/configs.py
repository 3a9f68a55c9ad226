"""Where the YAML groups lie, and what a choice of one has by default."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

HERE = Path(__file__).parent


def config_folder() -> Path:
    """``conf/`` beside the modules (a wheel), else beside the package (a clone or an editable install)."""
    for folder in (HERE / "conf", HERE.parent / "conf"):
        if (folder / "config.yaml").exists():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {HERE} or {HERE.parent}: the installation is incomplete")


def changed(group: str, choice: str, config: dict[str, Any]) -> dict[str, Any]:
    """Entries of ``config`` that differ from those of the group's file; none for a choice that is not shipped."""
    file = config_folder() / group / f"{choice}.yaml"
    if not file.is_file():
        return {}
    shipped = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(shipped, dict)
    return {key: value for key, value in config.items() if value != shipped.get(key)}
