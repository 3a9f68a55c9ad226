"""A mixture of sources through regenerate and capture on the tiny target: every prompt is accounted for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dspark_lab.data.dialogues import Dialogues
from dspark_lab.report.results import StageRecord, read_results

pytestmark = pytest.mark.slow
CONF = Path(__file__).parent.parent.parent / "conf"


def shared_chat(seed: int, num: int) -> list[dict]:
    """Dialogues as ShareGPT rows with answers of somebody else."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in dialogue.messages]
         + [{"from": "gpt", "value": "I do not know."}]}
        for dialogue in Dialogues(num_prompts=num, seed=seed)
    ]  # fmt: skip


def stages(tmp_path: Path, train: list[str], *overrides: str) -> dict[str, StageRecord]:
    command = [
        *(sys.executable, "-m", "dspark_lab", "+experiment=smoke", "stages=[regenerate,capture]"),
        *(f"run.root={tmp_path / 'runs'}", "run.name=mixed", "data.validation.num_prompts=4"),
        *("benchmark.prompts.num_prompts=4", *train, *overrides),
    ]
    environment = {**os.environ, "DSPARK_LAB_HOME": str(tmp_path / "home"), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {stage.name: stage for stage in read_results(tmp_path / "runs" / "mixed").stages}


def mixture(tmp_path: Path) -> list[str]:
    chat = tmp_path / "chat.jsonl"
    held_out = Dialogues(
        num_prompts=4, seed=yaml.safe_load((CONF / "benchmark/smoke.yaml").read_text())["prompts"]["seed"]
    )
    copied = [{"prompt": "Please answer me this question now, if you can: " + held_out_text(d)} for d in held_out]
    chat.write_text("".join(json.dumps(row) + "\n" for row in copied + shared_chat(7, 20)))
    source = f"{{_target_: dspark_lab.data.prompts.JsonLines, path: {chat}}}"
    own = "{_target_: dspark_lab.data.dialogues.Dialogues, num_prompts: 20, seed: 1000}"
    parts = f"{{chat: {{weight: 3.0, licence: CC0-1.0, revision: r7, source: {source}}}, own: {{source: {own}}}}}"
    return [
        "~data.train",
        f"+data.train={{_target_: dspark_lab.data.mixture.Mixture, num_prompts: 32, parts: {parts}}}",
    ]


def held_out_text(dialogue) -> str:
    return next(message["content"] for message in dialogue.messages if message["role"] == "user")


def test_a_mixture_with_several_samples_is_accounted_for_by_source_and_reason(tmp_path: Path) -> None:
    found = stages(
        tmp_path, mixture(tmp_path), "data.samples_per_prompt=2", "data.truncated=drop", "data.max_new_tokens=40"
    )
    regenerate, capture = found["regenerate"], found["capture"]
    assert regenerate.events["regenerated"] == 2 * 32 + 4 + 4
    assert regenerate.dropped["answer_truncated"] > 0
    chat, own = capture.sources
    assert (chat["name"], chat["weight"], chat["revision"], chat["licence"]) == ("chat", 3.0, "r7", "CC0-1.0")
    assert (chat["num_prompts"], own["num_prompts"]) == (24, 8)
    duplicates = capture.dropped.get("same content as another conversation", 0)
    assert regenerate.num_out is not None
    assert 0 <= regenerate.num_out - 8 - chat["num_samples"] - own["num_samples"] <= duplicates
    assert 0 < own["num_supervised_tokens"] < own["num_tokens"] < chat["num_tokens"]


def test_prompts_that_contain_an_evaluation_prompt_are_counted_and_dropped_if_asked(tmp_path: Path) -> None:
    found = stages(tmp_path, mixture(tmp_path), "data.overlap=drop")
    num_dropped = found["regenerate"].dropped["train_prompt_overlaps_evaluation"]
    metrics = {entry.name: entry for entry in read_results(tmp_path / "runs" / "mixed").metrics}
    assert num_dropped >= 1 and metrics["train_prompt_overlap"].value == num_dropped / 32
    assert metrics["train_prompt_overlap"].num_samples == 32
    assert sum(source["num_prompts"] for source in found["capture"].sources) == 32 - num_dropped
