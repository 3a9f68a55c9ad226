"""Where the YAML groups lie."""

from pathlib import Path

HERE = Path(__file__).parent


def config_folder() -> Path:
    """``conf/`` beside the modules (a wheel), else beside the package (a clone or an editable install)."""
    for folder in (HERE / "conf", HERE.parent / "conf"):
        if (folder / "config.yaml").exists():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {HERE} or {HERE.parent}: the installation is incomplete")
