"""`python -m dspark_lab` from a wheel in an empty folder, and from an editable install after a YAML was changed."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow


def python_without_the_package(folder: Path) -> Path:
    """A venv that sees this environment's packages, but in which dspark_lab is not installed yet."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    # A .pth file would run our editable install's own: so link the packages, all but ours.
    for package in ours.iterdir():
        if "dspark_lab" not in package.name and not (site / package.name).exists():
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


def test_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", source], check=True,
        capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    python = python_without_the_package(tmp_path / "venv")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    out = subprocess.run(
        [python, "-m", "dspark_lab", "+experiment=smoke", "--cfg", "job"], cwd=empty, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert "name: tiny" in out
    shipped = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "assets/tiny/model.safetensors", "report/template.html.jinja", "cluster/slurm.sh.jinja", "constraints.txt",
        "conf/experiment/smoke.yaml",
    ):  # fmt: skip
        assert f"dspark_lab/{needed}" in shipped


def test_an_editable_install_sees_a_changed_yaml(tmp_path: Path) -> None:
    """The clone's conf/ is read, not a copy made at installation time."""
    clone = tmp_path / "clone"
    for name in ("dspark_lab", "conf"):
        shutil.copytree(ROOT / name, clone / name)
    config = clone / "conf" / "optimizer" / "adamw.yaml"
    config.write_text(config.read_text().replace("lr: 1.0e-3", "lr: 0.125"))
    out = subprocess.run(
        [sys.executable, "-m", "dspark_lab", "--cfg", "job"], cwd=clone, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(clone), "PATH": "/usr/bin:/bin"},
    ).stdout  # fmt: skip
    assert "lr: 0.125" in out
