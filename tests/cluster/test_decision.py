"""The table of what one command does, row by row."""

import pytest

from dspark_lab.cluster.decision import Scheduler, missing_for_job, needs_job

NOWHERE = Scheduler(num_nodes=0, can_submit=False)
LOGIN = Scheduler(num_nodes=0, can_submit=True)


@pytest.mark.parametrize(
    ("cluster", "stages", "job"),
    [
        ("slurm", ["train"], True),
        ("slurm", ["plan", "train"], True),
        ("slurm", ["plan", "doctor"], False),
        ("attach", ["train"], False),
        ("local", ["train"], False),
    ],
)
def test_what_a_job_does(cluster: str, stages: list[str], job: bool) -> None:
    assert needs_job(stages, cluster=cluster) == job


@pytest.mark.parametrize(
    ("scheduler", "missing"),
    [
        (Scheduler(num_nodes=3, can_submit=True), None),
        (Scheduler(num_nodes=2, can_submit=True), "this Slurm allocation has 2 nodes, the job needs 3"),
        (LOGIN, None),
        (NOWHERE, "no Slurm is here"),
    ],
)
def test_where_a_job_can_be_carried_out(scheduler: Scheduler, missing: str | None) -> None:
    found = missing_for_job(num_nodes=3, scheduler=scheduler)
    assert missing is None if not found else missing is not None and missing in found[0].what and bool(found[0].mend)


def test_what_of_slurm_is_here() -> None:
    assert Scheduler.found({}, lambda name: None) == NOWHERE
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    assert Scheduler.found(inside, lambda name: f"/usr/bin/{name}") == Scheduler(num_nodes=3, can_submit=True)
    older = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    assert Scheduler.found(older, lambda name: None) == Scheduler(num_nodes=2, can_submit=False)
