"""Every option of every group composes; what contradicts or misspells is refused by name."""

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, OmegaConf

from dspark_lab.__main__ import refuse_swept_stages
from dspark_lab.configs import config_folder
from dspark_lab.pipeline import requested_stages
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.callbacks import build_callbacks, monitored
from dspark_lab.records import TokenizedConversation

OPTIONS = [
    (file.parent.relative_to(config_folder()).as_posix(), file.stem)
    for file in sorted(config_folder().rglob("*.yaml"))
    if file.parent != config_folder()
]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_resolves(group: str, option: str) -> None:
    if group == "traces/published":  # an option of traces in a folder of its own
        group, option = "traces", f"published/{option}"
    prefix = "+" if group in ("experiment", "published", "rehearse", "sweep") else ""
    missing = ["target.model=x"] if option == "hf" else []
    missing += ["data.train.path=a", "data.validation.path=b"] if option == "jsonl" else []
    missing += ["hardware.path=a"] if (group, option) == ("hardware", "measured") else []
    missing += ["data.train.path=a", "data.validation.split=b"] if (group, option) == ("data", "huggingface") else []
    below = [f"+experiment=kimi_k3_{option.partition('_')[2] or 'dspark'}"] if group == "rehearse" else []
    config = composed(*below, f"{prefix}{group}={option}", *missing)
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=False)


def watching(*overrides: str) -> dict[str, Callback]:
    """The callbacks of a run without a target."""
    conversation = TokenizedConversation("a", torch.tensor([1, 2, 3]), torch.tensor([False, True, True]))
    parts = SimpleNamespace(
        config=composed(*overrides),
        corpus=SimpleNamespace(regenerate=True),
        conversations=SimpleNamespace(tokenized={"validation": [conversation]}),
        store=SimpleNamespace(get=lambda key: None),
        target=None,
    )
    made = build_callbacks(parts, monitor="val/acceptance_length")  # pyright: ignore
    return {type(callback).__name__: callback for callback in made}


def test_what_chooses_the_best_checkpoint() -> None:
    assert monitored(composed(), replayable=True) == "val/acceptance_length"
    assert monitored(composed(), replayable=False) == "val/acceptance_length_estimate"
    decoding = composed("callbacks/decode=default", "callbacks.decode.chooses_best=true")
    assert monitored(decoding, replayable=True) == "val/decode_acceptance_length"


def test_every_callback_builds() -> None:
    assert watching().keys() == {"ReplayAcceptance", "SpikeGuard"}
    nested = [f"{group}={option}" for group, option in OPTIONS if group.startswith("callbacks/")]
    assert len(nested) == 3
    assert watching(*nested).keys() == {
        "ReplayAcceptance", "SpikeGuard", "EarlyStop", "DecodeAcceptance", "WeightAverage",
    }  # fmt: skip
    assert watching("callbacks.spike_guard=null", "callbacks.replay=null") == {}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["callbacks.spike_guard.window=some"], r"callbacks\.spike_guard\.window"),
        (["callbacks/ema=default", "callbacks.ema.decay=2"], r"callbacks\.ema: decay=2\.0"),
        (["+callbacks.sipke_guard={_target_: x}"], "sipke_guard is none of replay, spike_guard"),
    ],
)
def test_a_wrong_callback_is_refused_with_its_key(overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        watching(*overrides)


@pytest.mark.parametrize(("group", "option"), [pair for pair in OPTIONS if pair[0] in ("optimizer", "lr_schedule")])
def test_every_optimizer_and_schedule_builds(group: str, option: str) -> None:
    assert build(composed(f"{group}={option}"), group) is not None


@pytest.mark.parametrize("option", [option for group, option in OPTIONS if group == "hardware"])
def test_every_hardware_builds(option: str) -> None:
    path = ["hardware.path=deepseek_v4_flash_b300_tp4"] if option == "measured" else []
    assert build(composed(f"hardware={option}", *path), "hardware").name == option


BUILDABLE = ["data", "benchmark", "evaluate", "export", "loss", "optimizer", "lr_schedule", "engine", "profile", "plan"]


@pytest.mark.parametrize("experiment", [file.stem for file in sorted((config_folder() / "experiment").glob("*.yaml"))])
def test_every_experiment_builds_what_needs_no_target(experiment: str) -> None:
    config = composed(f"+experiment={experiment}")
    servers = config.engine._target_.endswith("VllmTarget")
    from_the_run: dict[str, Any] = {"engine": {"cluster": None, "namespace": "run"}} if servers else {}
    for key in BUILDABLE:
        assert build(config, key, **from_the_run.get(key, {})) is not None, key
    ranks = config.trainer.num_nodes * (config.trainer.devices if isinstance(config.trainer.devices, int) else 1)
    build(config, "loss").check_batches(world_size=ranks, accumulate=config.trainer.accumulate)


@pytest.mark.parametrize(
    "override", ["drafter.blok_size=4", "trainer.max_step=3", "data.row_token=9", "evalute.seed=1"]
)
def test_a_misspelt_key_is_named(override: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert override.partition("=")[0].rpartition(".")[2] in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.row_tokens=many", "data.row_tokens"),
        ("hardware.memory_bytes=-1", "hardware.memory_bytes"),
        ("hardware.costs.dense_efficiency=2", "hardware.costs.dense_efficiency"),
        ("profile.repeats=0", "profile.repeats"),
        ("data.samplings=[{temprature: 1.0}]", "temprature"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("optimizer.lr=-1", "lr=-1"),
        ("evaluate.mode=guess", "evaluate.mode"),
        ("evaluate.top_p=2", "top_p=2"),
        ("export.dtype=float16", "export.dtype"),
        ("lr_schedule.warmup_share=1.5", "warmup_share=1.5"),
        ("benchmark.prompts.num_prompts=some", "num_prompts"),
        ("engine.layer_ids=top", "engine.layer_ids"),
        ("data.regenerate=false", "packaged_answers"),
        ("loss.normalizer=local", "loss.normalizer"),
        ("loss.dspark.decay=-1", "decay=-1.0 for weighting=exponential"),
        ("loss.dspark.terms.l1=much", "loss.dspark.terms.l1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(override: str, key: str) -> None:
    config = composed(override)
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build(config, override.partition(".")[0])


def test_stages_keep_the_order_of_the_way_through() -> None:
    assert requested_stages("evaluate") == ["evaluate"]
    assert requested_stages(["report", "train"]) == ["train", "report"]
    for wrong in ("serv", ["train", "trian"], []):
        with pytest.raises(
            ValueError,
            match="plan, doctor, regenerate, capture, train, evaluate, calibrate, export, serve, profile, simulate, "
            "recompute, collect, report, show",
        ):
            requested_stages(wrong)


def test_help_lists_groups_experiments_and_stages() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "dspark_lab", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for group, option in OPTIONS:
        line = next(line for line in out.splitlines() if line.startswith(f"{group}: "))
        assert option in line
    assert "regenerate -> capture -> train -> evaluate -> export -> report" in out


def test_the_config_folder_is_the_repositorys_own() -> None:
    assert config_folder() == Path(__file__).parent.parent / "conf"


def test_sweeping_over_stages_is_refused_with_the_form_that_was_meant() -> None:
    with pytest.raises(SystemExit, match=r"'stages=\[train,evaluate\]'"):
        refuse_swept_stages(["-m", "stages=train,evaluate"])
    refuse_swept_stages(["stages=train", "stages=[train,evaluate]", "seed=1,2"])


def readme_commands() -> list[list[str]]:
    lines = (Path(__file__).parent.parent / "README.md").read_text().splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python -m dspark_lab")]


@pytest.mark.parametrize("command", readme_commands(), ids=" ".join)
def test_every_command_of_the_readme_composes(command: list[str]) -> None:
    """CI runs the smoke experiment and the report for real; here no command may have a stale key."""
    overrides = [word for word in command[3:] if word not in ("-m", "--help")]
    # A sweep's first job stands for all.
    first = [word if "[" in word else word.split(",")[0] for word in overrides]
    assert composed(*first)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["evaluate.verification=block"], r"evaluate: verification=block with temperature=0\.0: .*verification=token"),
        (["evaluate.verification=blok"], r"evaluate\.verification='blok'"),
    ],
)
def test_a_verification_that_could_not_take_effect_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(composed(*overrides), "evaluate")
    recipe = build(composed("evaluate.verification=block", "evaluate.temperature=1"), "evaluate")
    assert recipe.verification == "block"
