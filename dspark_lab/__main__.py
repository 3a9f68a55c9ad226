"""``python -m dspark_lab``: Hydra composes the config, the pipeline carries it out."""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from dspark_lab.configs import config_folder


class JobError(CompactHydraException):
    """Of one job of a sweep; Hydra shows its message without a stack trace."""


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
def hydra_main(config: DictConfig) -> float | None:
    # Imported late: --help and a misspelt key should answer at once.
    from dspark_lab.capture.endpoint import EndpointError
    from dspark_lab.capture.protocol import CaptureError, EngineUnreachableError
    from dspark_lab.cluster.services import ServiceError
    from dspark_lab.data.live import LiveDataError
    from dspark_lab.nothere import EXIT_CODE, NotHere
    from dspark_lab.pipeline import run
    from dspark_lab.store.mooncake_admin import MasterUnreachableError
    from dspark_lab.training.launch import RankError

    try:
        return run(config)
    except NotHere as told:
        print(told, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except (
        ValueError,
        ImportError,
        RankError,
        ServiceError,
        EndpointError,
        CaptureError,
        EngineUnreachableError,
        LiveDataError,
        MasterUnreachableError,
    ) as error:
        # A user's mistake, a missing part or a service that failed: its message says all; a stack trace would bury it.
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        job = HydraConfig.get()
        if job.mode is not RunMode.MULTIRUN:
            sys.exit(f"error: {error}")
        # The launcher goes on with the other jobs; at the end the sweeper raises the first of these.
        print(f"error: job {job.job.num} ({' '.join(job.overrides.task)}): {error}", file=sys.stderr)
        raise JobError(f"error: {error}") from error


def refuse_swept_stages(arguments: Sequence[str]) -> None:
    """``-m stages=train,evaluate`` would be two jobs of one stage each, which nobody means."""
    for argument in arguments:
        stages = argument.removeprefix("stages=")
        if stages != argument and "," in stages and not stages.startswith("["):
            sys.exit(f"error: {argument} sweeps over stages; several stages of one run are a list: 'stages=[{stages}]'")


OVERLAYS = ("+experiment=", "+sweep=", "+rehearse=")
"""Groups laid over the config, each over those before it."""


def in_order(arguments: Sequence[str]) -> list[str]:
    """Hydra lets the later of two overlays win; so they get one order, however they were typed."""

    def rank(argument: str) -> int:
        return next((rank for rank, overlay in enumerate(OVERLAYS, start=1) if argument.startswith(overlay)), 0)

    return sorted(arguments, key=rank)


def main() -> None:
    sys.argv[1:] = in_order(sys.argv[1:])
    refuse_swept_stages(sys.argv[1:])
    hydra_main()


if __name__ == "__main__":
    main()
