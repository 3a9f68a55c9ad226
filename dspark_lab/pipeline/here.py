"""Before a job is written: the plan is shown, and where it could not be carried out, what is missing."""

from collections.abc import Sequence

from dspark_lab.cluster.decision import Scheduler, missing_for_job
from dspark_lab.nothere import NotHere
from dspark_lab.pipeline.doctor import missing_here
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.plan import plan
from dspark_lab.pipeline.slurm import num_nodes_of
from dspark_lab.progress import console


def before_job(parts: Parts, stages: Sequence[str], *, scheduler: Scheduler | None = None) -> list[str]:
    """Show the plan; the stages that are left for the job.

    Raises:
        NotHere: neither in an allocation of the right size nor where jobs are submitted.
        ValueError: the plan cannot work.
    """
    plan(parts)
    missing = missing_for_job(num_nodes=num_nodes_of(parts, stages), scheduler=scheduler or Scheduler.found())
    if missing:
        raise NotHere(parts.info.command, [*missing, *missing_here(parts)])
    left = [stage for stage in stages if stage not in ("plan", "doctor")]
    if "serve" in left and parts.config.cluster.nodes_per_set > 1:
        left.remove("serve")
        console.print(
            "serve: left out of the job, which cannot start a server over several nodes for it. Afterwards start the line "
            "of the export's card there, then give this command with: stages=serve cluster=attach "
            "serve.endpoint=http://HOST:8000",
            soft_wrap=True,
        )
    return left
