"""The table of what one command does, row by row."""

import pytest

from dspark_lab.cluster.decision import Scheduler, decide

NOWHERE = Scheduler(num_nodes=0, can_submit=False)
LOGIN = Scheduler(num_nodes=0, can_submit=True)


@pytest.mark.parametrize(
    ("cluster", "scheduler", "stages", "decision"),
    [
        ("slurm", Scheduler(num_nodes=3, can_submit=True), ["train"], "run"),
        ("slurm", Scheduler(num_nodes=2, can_submit=True), ["train"], "plan"),
        ("slurm", LOGIN, ["train"], "render"),
        ("slurm", NOWHERE, ["train"], "plan"),
        ("slurm", NOWHERE, ["plan", "doctor"], "run"),
        ("attach", NOWHERE, ["train"], "run"),
        ("local", NOWHERE, ["train"], "run"),
    ],
)
def test_what_one_command_does(cluster: str, scheduler: Scheduler, stages: list[str], decision: str) -> None:
    decided, missing = decide(stages, cluster=cluster, num_nodes=3, scheduler=scheduler)
    assert decided == decision
    assert bool(missing) == (decision == "plan") and all(entry.mend for entry in missing)


def test_what_of_slurm_is_here() -> None:
    assert Scheduler.found({}, lambda name: None) == NOWHERE
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    assert Scheduler.found(inside, lambda name: f"/usr/bin/{name}") == Scheduler(num_nodes=3, can_submit=True)
