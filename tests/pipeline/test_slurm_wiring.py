"""What a run asks of its Slurm job, and what is refused before anything is submitted."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.pipeline import settle, slurm
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.slurm import hand_over, num_nodes_of, without_cluster, work_of, write_job
from dspark_lab.run import Run
from dspark_lab.target.resolve import ASSETS
from dspark_lab.training.place import Place

LIVE = ("target=tiny", "data=dialogues", "engine=vllm", "store=mooncake", "data.source=live", "trainer.num_nodes=2")
STAGES = ["regenerate", "capture", "train", "evaluate", "export"]


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "job_arguments", lambda parts: ["+experiment=e", "cluster=slurm", "cluster.num_sets=1"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def parts(folder: Path, *overrides: str) -> Any:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["cluster=slurm", *overrides], return_hydra_config=True)
    choices = {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}
    return SimpleNamespace(
        config=config, run=Run("run", folder, "hash"), info=SimpleNamespace(choices=choices), home=folder,
        corpus=SimpleNamespace(source=config.data.source),
    )  # fmt: skip


def test_each_stage_runs_where_its_services_are(tmp_path: Path) -> None:
    work = work_of(parts(tmp_path, *LIVE), STAGES)
    assert (work.before, work.train, work.after) == (("capture",), True, ("evaluate", "export"))
    assert work.engine and work.engine.answers and work.engine.captures
    assert work.engine.layer_ids == (1, 2, 3, 4) and work.engine.model == str(ASSETS / "tiny")
    assert (work.num_nodes, work.ranks_per_node, work.arguments[0]) == (2, 1, "+experiment=e")
    assert "trainer.num_nodes=2" in work.arguments and not any("num_sets" in told for told in work.arguments)


def test_without_an_engine_all_stages_are_the_runs_own(tmp_path: Path) -> None:
    work = work_of(parts(tmp_path), STAGES)
    assert work.engine is None and work.before == ("regenerate", "capture")
    assert work_of(parts(tmp_path, *LIVE), ["evaluate"]).engine is None


def test_what_says_where_a_run_is_carried_out_is_not_passed_on() -> None:
    given = ["cluster=slurm", "cluster.submit=true", "+cluster.environment.A=1", "cluster_of=1", "trainer.num_nodes=2"]
    assert without_cluster(given) == ["cluster_of=1", "trainer.num_nodes=2"]


def test_an_experiment_may_say_what_another_cluster_needs(tmp_path: Path) -> None:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["cluster=attach", "+cluster.num_sets=2", "+cluster.roles.vllm.arguments=[--x]"])
    attached = Parts.cluster.func(
        SimpleNamespace(config=config, run=Run("run", tmp_path, "hash"), corpus=SimpleNamespace(source="stored"))
    )  # pyright: ignore
    assert attached.mooncake().master_address == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.devices=auto"], "this machine does not know the nodes' GPUs"),
        (["trainer.devices=8", "cluster.gpus_per_node=4"], "trainer.devices=8 is more than cluster.gpus_per_node=4"),
        (["engine=vllm", "target=hf", "target.model=m"], "target.layer_ids and target.num_layers must be numbers"),
        (["cluster.ports.vllm=http"], r"cluster\.ports\.vllm"),
        (["cluster.mooncake.local_hostname=a"], r"cluster\.mooncake\.local_hostname"),
    ],
)
def test_what_cannot_be_a_job_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write_job(parts(tmp_path, *overrides), STAGES)


def test_an_allocation_of_the_right_size_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stored = parts(tmp_path, "target=tiny", "engine=vllm", "trainer.num_nodes=2")
    assert num_nodes_of(parts(tmp_path, *LIVE), STAGES) == 3 and num_nodes_of(stored, ["train"]) == 2
    script = write_job(parts(tmp_path, *LIVE), STAGES)
    became: list[Any] = []

    def become(program: str, command: list[str]) -> None:
        became.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "execvp", become)
    with pytest.raises(SystemExit):
        hand_over(script, submits=True)
    assert became == [["bash", str(script)]]


def test_the_tasks_of_a_step_are_a_group_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stages=doctor each looks at its own machine; the first holds the run."""
    config: Any = SimpleNamespace(run=SimpleNamespace(fresh=False))
    for name, value in {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert settle(["doctor"], config) == Place(2, 0, 1, None) and not settle(["doctor"], config).leads
    with pytest.raises(ValueError, match="a group only does stages=train"):
        settle(["plan"], config)
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert settle(["doctor"], config).leads


def test_to_submit_needs_an_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no sbatch on this machine"):
        hand_over(tmp_path / "job.sh", submits=True)
