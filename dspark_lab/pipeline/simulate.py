"""Stage *simulate*: the frontier of a scheduler against its baselines, on hardware that need not be there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dspark_lab.configs import config_folder
from dspark_lab.hardware.deployment import Deployment, Hardware, deploy
from dspark_lab.hardware.protocol import HardwareProfile
from dspark_lab.hardware.served import ServedDrafter, ServedTarget
from dspark_lab.pipeline.build import build, build_scheduler
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.records import Metric
from dspark_lab.report.results import RESULTS_FILE, read_results
from dspark_lab.report.vocabulary import metric
from dspark_lab.scheduler.oracle import Oracle
from dspark_lab.scheduler.protocol import VerifyScheduler
from dspark_lab.serving.acceptance import AcceptanceTable
from dspark_lab.serving.frontier_file import Curve, FrontierFile, gains_by_load, gains_over, rate_of
from dspark_lab.serving.recipe import Simulation
from dspark_lab.serving.sources import RunTraces, Traces
from dspark_lab.serving.study import Scheme, Simulated, simulate_load


def simulate(parts: Parts) -> Outcome:
    """Every scheme at every load; writes them into the run's ``frontiers/``. No target is loaded."""
    config = parts.config
    recipe: Simulation = build(config, "simulate")
    hardware: Hardware = build(config, "hardware")
    table, drafter, source = acceptance_of(parts)
    lengths = lengths_of(recipe, table, drafter)
    compared = schemes_of(parts, recipe, table)
    schemes = [*compared, *lengths.values()]
    points: list[Simulated] = []
    told: list[str] = []
    jobs = [(scheme, number, load) for scheme in schemes for number in recipe.num_gpus for load in recipe.loads]
    deployments: dict[tuple[bool, int | None], Deployment] = {}
    for scheme, number, load in track(jobs, "simulate"):
        key = (scheme.acceptance is None, number)
        if key not in deployments:
            deployments[key] = deployed(
                config, hardware, None if scheme.acceptance is None else drafter, recipe, number
            )
            told.append(deployments[key].told)
        points.append(simulate_load(scheme, deployments[key], recipe, load))
    setting = setting_of(parts, table, recipe, profile=told[0])

    def curve(scheme: Scheme) -> Curve:
        return Curve.of(scheme.name, [entry for entry in points if entry.scheme == scheme.name])

    curves, fixed = [curve(scheme) for scheme in compared], {k: curve(scheme) for k, scheme in lengths.items()}
    written = FrontierFile(
        setting=setting,
        source=source,
        curves=tuple(curves),
        gains=gains_over(curves),
        lengths=tuple(fixed.values()),
        by_load=gains_by_load(curves, fixed, setting),
    )
    folder = written.save(parts.run.directory)
    console.print(f"simulate: {told[0]}; points in {folder}")
    for sentence in written.sentences:
        console.print(f"simulate: {sentence}")
    outside = sum(entry.extrapolated is not None for entry in points)
    events = {"points that use extrapolated step times": outside} if outside else {}
    record = {"num_in": len(points), "num_out": len(points), "unit": "points", "events": events}
    return record, simulation_metrics(points, written, setting)


def acceptance_of(parts: Parts) -> tuple[AcceptanceTable, ServedDrafter, str]:
    """What ``traces`` names: rounds, the drafter that had them, and where they are from."""
    traces: Traces = build(parts.config, "traces")
    if not isinstance(traces, RunTraces):
        table = traces.table(target_name=parts.config.target.name, seed=int(parts.config.seed))
        return table, traces.drafter, traces.source
    table = traces.table(parts.run.traces)
    found = read_results(parts.run.directory).metrics if (parts.run.directory / RESULTS_FILE).exists() else ()
    trained = next((entry.value for entry in found if entry.name == "num_parameters"), None)
    number = traces.num_parameters if traces.num_parameters is not None else trained
    if number is None:
        raise ValueError("traces.num_parameters is null and this run trained no drafter: say how many its drafter has")
    drafter = traces.drafter(parts.info.choices["drafter"], num_draft_tokens=table.width, num_parameters=number)
    return table, drafter, traces.source


def schemes_of(parts: Parts, recipe: Simulation, table: AcceptanceTable) -> list[Scheme]:
    """The run's scheduler, then its baselines. Plain decoding is always the one without a drafter."""
    chosen = parts.info.choices["scheduler"]
    scheme = Scheme(name=scheduler_name(parts), acceptance=table, make_scheduler=maker(parts))
    schemes = [] if chosen == "none" else [scheme]
    if chosen == "none" or "none" in recipe.baselines:
        schemes.append(Scheme(name="none", acceptance=None))
    if "mtp1" in recipe.baselines:
        first = table.narrowed(1, name="mtp1")
        schemes.append(Scheme(name="mtp1", acceptance=first, draft_share=recipe.mtp1_draft_share))
    if chosen != "oracle" and "oracle" in recipe.baselines:
        schemes.append(Scheme(name="oracle", acceptance=table, make_scheduler=lambda profile: Oracle(hardware=profile)))
    return schemes


def scheduler_name(parts: Parts) -> str:
    """The chosen scheduler with what differs from its config group: "hardware_aware, mode=early_stop"."""
    chosen = parts.info.choices["scheduler"]
    file = config_folder() / "scheduler" / f"{chosen}.yaml"
    if not file.is_file():  # of the user's own
        return chosen
    shipped = OmegaConf.load(file)
    changed = [f"{key}={value}" for key, value in parts.config.scheduler.items() if value != shipped.get(key)]
    return ", ".join([chosen, *changed])


def lengths_of(recipe: Simulation, table: AcceptanceTable, drafter: ServedDrafter) -> dict[int, Scheme]:
    """Every fixed length, drafted no longer than it is verified: a drafter of one pass a token then takes fewer passes."""
    if "fixed" not in recipe.baselines:
        return {}
    return {
        number: Scheme(
            name=f"fixed {number}",
            acceptance=table.narrowed(number),
            draft_share=number / table.width if drafter.num_passes > 1 else 1.0,
            num_seeds=1,
        )
        for number in range(1, table.width + 1)
    }


def maker(parts: Parts) -> Callable[[HardwareProfile], VerifyScheduler]:
    """Builds ``scheduler`` anew for each simulation; a calibrated run's confidences go through its temperatures."""
    calibrated = parts.info.choices["traces"] == "run" and parts.run.calibration.is_file()
    calibration = parts.run.calibration if calibrated else None
    return lambda profile: build_scheduler(parts.config, profile, calibration=calibration)


def deployed(
    config: DictConfig, hardware: Hardware, drafter: ServedDrafter | None, recipe: Simulation, num_gpus: int | None
) -> Deployment:
    served: ServedTarget | None = None if config.target.serving is None else build(config, "target.serving")
    try:
        return deploy(
            hardware,
            target_name=config.target.name,
            target=served,
            drafter=drafter,
            num_gpus=num_gpus,
            memory_utilisation=recipe.memory_utilisation,
        )
    except ValueError as error:
        raise ValueError(f"simulate: {error}") from error


def setting_of(parts: Parts, table: AcceptanceTable, recipe: Simulation, *, profile: str) -> dict[str, Any]:
    """What all simulated numbers of the stage have in common."""
    workload = recipe.workload
    return {
        "hardware": parts.info.choices["hardware"],
        "target": parts.config.target.name,
        "traces": table.name,
        "acceptance": table.origin,
        "num_draft_tokens": table.width,
        "step_times": profile,
        "arrivals": workload.arrivals,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "spread": workload.spread,
        "prefill": recipe.limits.prefill,
        "duration_s": recipe.duration_s,
        "warmup_s": recipe.warmup_s,
        "num_seeds": len(recipe.seeds),
    }


def simulation_metrics(points: Sequence[Simulated], written: FrontierFile, setting: Mapping[str, Any]) -> list[Metric]:
    found = [
        metric(
            f"simulated_{name}",
            estimate.value,
            low=estimate.low,
            high=estimate.high,
            origin="simulated",
            setting={
                **setting,
                "scheduler": entry.scheme,
                "load": entry.load,
                "num_gpus": entry.num_gpus,
                "extrapolated": entry.extrapolated,
            },
        )
        for entry in points
        for name, estimate in entry.metrics.items()
    ]
    found += [
        metric(
            "simulated_gain",
            gain.ratio,
            origin="simulated",
            setting={
                **setting,
                "scheduler": gain.scheme,
                "over": gain.over,
                "tokens_per_s_per_user": gain.interactivity,
            },
        )
        for gain in written.gains
    ]
    found += [
        metric(
            f"simulated_gain_{name}",
            value,
            origin="simulated",
            setting={
                **setting,
                "scheduler": gain.scheme,
                "load": gain.load,
                "num_gpus": gain.num_gpus,
                "length": length,
                "rate": rate_of(setting),
            },
        )
        for gain in written.by_load
        for name, value, length in (
            ("over_best_length", gain.over_best, gain.best_length),
            ("over_one_length", gain.over_one, gain.one_length),
        )
    ]
    return found
