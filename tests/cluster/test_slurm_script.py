"""The batch script as text: who runs where with what, and that bash can read it. That it runs: integration/test_slurm.py."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.cluster.interface import Interface, choose
from dspark_lab.cluster.slurm import Engine, SlurmJob, Work, in_bash, variable
from dspark_lab.configs import config_folder
from dspark_lab.pipeline.build import build

RACK = (
    "cluster=slurm", "cluster.nodes_per_set=2", "cluster.gpus_per_node=4", "cluster.subnet=10.1.0.0/16",
    "+cluster.environment.NCCL_MNNVL_ENABLE=1", "cluster.partition=rack", "cluster.account=lab",
    "cluster.time_limit='24:00:00'", "cluster.roles.vllm.container_image=vllm.sqsh",
    "cluster.roles.vllm.arguments=[--tensor-parallel-size,8,--enable-expert-parallel,--max-model-len,8193]",
    "cluster.roles.training.command_prefix=[numactl,--localalloc]",
)  # fmt: skip
K3 = Engine(
    model="moonshotai/Kimi-K3", revision=None, layer_ids=(24, 48, 72, 88, 92, 93), dtype="bfloat16", answers=True,
    captures=True,
)  # fmt: skip


def job(*overrides: str) -> SlurmJob:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return build(compose("config", [*RACK, *overrides]), "cluster")


def work(folder: Path, **settings: Any) -> Work:
    told: dict[str, Any] = {
        "name": "kimi_k3", "folder": folder, "arguments": ("+experiment=kimi_k3_dspark", "data.name='a b'"),
        "before": ("capture",), "train": True, "after": ("evaluate", "export"), "num_nodes": 1, "ranks_per_node": 4,
        "engine": K3, "stores_in_mooncake": True,
    }  # fmt: skip
    return Work(**{**told, **settings})


def checked(script: str, folder: Path) -> str:
    path = folder / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=error", str(path)], check=True)
    return script


def test_a_set_of_three_nodes(tmp_path: Path) -> None:
    script = checked(job().render(work(tmp_path)), tmp_path)
    directives = re.findall("^#SBATCH (.*)", script, re.MULTILINE)
    wanted = ["--nodes=3", "--gpus-per-node=4", "--partition=rack", "--account=lab", "--time=24:00:00", "--exclusive",
              "--signal=B:USR1@300", "--requeue", "--open-mode=append"]  # fmt: skip
    assert set(wanted) <= set(directives)
    assert "export NCCL_MNNVL_ENABLE=1" in script
    head, headless = re.findall(r"^  step (vllm_.*\n.*)", script, re.MULTILINE)
    assert head.startswith('vllm_0 "${nodes[0]}"') and "--host {address} --port 8000" in head
    assert headless.startswith('vllm_0_rank_1 "${nodes[1]}"') and "--headless" in headless
    for rank, line in enumerate((head, headless)):
        assert f'--nnodes 2 --node-rank {rank} --master-addr "${{address[${{nodes[0]}}]}}"' in line
    (engine,) = re.findall(r"^vllm=\((.*)\)", script, re.MULTILINE)
    assert engine.startswith("--container-image=vllm.sqsh ") and "dspark_lab.cluster.interface 10.1.0.0/16" in engine
    assert (
        "serve moonshotai/Kimi-K3" in engine
        and "--tensor-parallel-size 8" in engine
        and "--enforce-eager" not in engine
    )
    assert 'trainers=("${nodes[@]:2}")' in script and "WORLD_SIZE=4" in script
    assert 'step mooncake_master "${nodes[0]}"' in script and 'step segment_0 "${nodes[0]}"' in script
    (lab,) = re.findall(r"^lab=\((.*)\)", script, re.MULTILINE)
    told = shlex.split(lab)
    assert told[1:3] == ["numactl", "--localalloc"] and told.index("cluster=attach") > told.index("data.name='a b'")
    assert """'{"mooncake": {"master_server_address": "'"$master"'",""" in script.replace(
        '"kv_connector_extra_config": ', "'"
    )
    assert "engine.endpoints=[$endpoints]" in told and "cluster.mooncake.local_hostname={address}" in told
    order = ["engines --", "stages=regenerate", "touch", "eagle_aux_hidden_state_layer_ids", "'stages=[capture]'",
             "stages=train", "stages=[evaluate,export]"]  # fmt: skip
    places = [script.index(text, script.index("# Engines that answer")) for text in order[1:]]
    assert places == sorted(places)


def test_two_sets_feed_one_group_of_ranks(tmp_path: Path) -> None:
    script = checked(job("cluster.num_sets=2").render(work(tmp_path, num_nodes=2)), tmp_path)
    assert "#SBATCH --nodes=6" in script and 'trainers=("${nodes[@]:4}")' in script and "WORLD_SIZE=8" in script
    started = re.findall(r'^  step (vllm_\w+) "\$\{nodes\[(\d)\]\}"', script, re.MULTILINE)
    assert started == [("vllm_0", "0"), ("vllm_0_rank_1", "1"), ("vllm_1", "2"), ("vllm_1_rank_1", "3")]
    assert "endpoints=http://${address[${nodes[0]}]}:8000,http://${address[${nodes[2]}]}:8000\n" in script
    assert f'--memory "$admin" {2 * 2**35}' in script


def test_stored_states_need_nodes_for_training_alone(tmp_path: Path) -> None:
    script = checked(job().render(work(tmp_path, engine=None, stores_in_mooncake=False, num_nodes=2)), tmp_path)
    assert "#SBATCH --nodes=2" in script and 'trainers=("${nodes[@]:0}")' in script
    assert "vllm" not in script and "mooncake" not in script


def test_arguments_survive_bash() -> None:
    arguments = ["a b", 'say "x"', "it's", '{"k": "' + variable("master") + '"}', variable("master"), "$HOME", ""]
    said = subprocess.run(
        ["bash", "-c", f"master=h:1; printf '%s\\n' {in_bash(arguments)}"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split("\n") == ["a b", 'say "x"', "it's", '{"k": "h:1"}', "h:1", "$HOME", "", ""]


def test_the_interface_is_chosen_by_subnet() -> None:
    present = [Interface("lo", "127.0.0.1"), Interface("mgmt0", "10.2.0.7"), Interface("fab0", "10.1.0.7")]
    assert choose("10.1.0.0/16", present, ["10.2.0.7"]).name == "fab0"
    assert choose("", present, ["10.2.0.7"]).name == "mgmt0"
    with pytest.raises(ValueError, match=r"no interface in cluster\.subnet=10\.9\.0\.0/16 .*fab0 10\.1\.0\.7"):
        choose("10.9.0.0/16", present, [])
    with pytest.raises(ValueError, match=r"set cluster\.subnet"):
        choose("", present, ["192.0.2.1"])
    with pytest.raises(ValueError, match=r"cluster\.subnet='10\.1\.0\.7/16'"):
        choose("10.1.0.7/16", present, [])
