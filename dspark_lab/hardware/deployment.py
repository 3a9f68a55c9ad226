"""A target and a drafter on so many GPUs of some hardware: its step times, and its room for context."""

from dataclasses import dataclass, replace

from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.hardware.calibrated import Calibrated, calibrate_published, uncalibrated
from dspark_lab.hardware.roofline import Roofline
from dspark_lab.hardware.served import Capacity, ServedDrafter, ServedTarget, capacity, fewest_gpus
from dspark_lab.hardware.table import MeasuredHardware, TableProfile

Hardware = Accelerator | MeasuredHardware
"""What a ``hardware=`` option builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """``room`` None: context without a limit. ``drafter`` None: plain decoding."""

    name: str
    profile: Calibrated | TableProfile
    drafter: ServedDrafter | None
    room: Capacity | None
    num_gpus: int

    @property
    def told(self) -> str:
        """One line: where its step times come from."""
        if isinstance(self.profile, TableProfile):
            return f"measured table {self.profile.measurement.name} (fit {100 * self.profile.mape:.1f} %)"
        return "roofline, not calibrated" if self.profile.fit is None else f"roofline, {self.profile.fit}"


def deploy(
    hardware: Hardware,
    *,
    target_name: str,
    target: ServedTarget | None,
    drafter: ServedDrafter | None,
    num_gpus: int | None,
    memory_utilisation: float,
) -> Deployment:
    """``num_gpus`` None: the fewest that hold the target, or as many as were measured.

    Raises:
        ValueError: too little memory (it says how many GPUs are needed), another target than was measured, or a target
            whose bytes are not known.
    """
    if isinstance(hardware, MeasuredHardware):
        return _deploy_measured(hardware, target_name, target, drafter, num_gpus)
    if target is None:
        raise ValueError(
            f"target.serving of {target_name} is null: say what it weighs when it is served (conf/target/kimi_k3.yaml shows "
            "how), or use hardware=measured"
        )
    if num_gpus is None:
        num_gpus = fewest_gpus(hardware, target, drafter, memory_utilisation=memory_utilisation)
    room = capacity(hardware, target, drafter, num_gpus=num_gpus, memory_utilisation=memory_utilisation)
    base = Roofline(accelerator=hardware, target=target, num_gpus=num_gpus, costs=hardware.costs, drafter=drafter)
    calibration = hardware.calibrations.get(target_name)
    if calibration is None:
        profile = uncalibrated(base)
    elif drafter is None:
        # The observations with drafts fix the other costs as well; they need a drafter of no weight of its own.
        fitted = calibrate_published(replace(base, drafter=WEIGHTLESS), calibration)
        profile = replace(fitted, roofline=replace(fitted.roofline, drafter=None))
    else:
        profile = calibrate_published(base, calibration)
    return Deployment(name=hardware.name, profile=profile, drafter=drafter, room=room, num_gpus=num_gpus)


WEIGHTLESS = ServedDrafter(
    name="none", num_draft_tokens=1, num_passes=1, parameters=0, bytes_per_parameter=1, context_bytes_per_token=0
)


def _deploy_measured(
    hardware: MeasuredHardware,
    target_name: str,
    target: ServedTarget | None,
    drafter: ServedDrafter | None,
    num_gpus: int | None,
) -> Deployment:
    measured = hardware.measurement
    if measured.target != target_name:
        raise ValueError(
            f"hardware.path is a profile of target {measured.target!r}, this run has target={target_name}: measure it with "
            "stages=profile"
        )
    if num_gpus not in (None, measured.num_gpus):
        raise ValueError(f"num_gpus={num_gpus}: profile {measured.name} was measured on {measured.num_gpus}")
    room = None
    if hardware.memory_bytes is not None:
        if target is None:
            raise ValueError(
                f"hardware.memory_bytes is set, but target.serving of {target_name} is null: give its bytes"
            )
        per_token = target.context_bytes_per_token + (0 if drafter is None else drafter.context_bytes_per_token)
        room = Capacity(
            free_bytes=hardware.memory_bytes,
            bytes_per_token=per_token,
            bytes_per_request=target.state_bytes_per_request,
        )
    profile = TableProfile.fit(measured)
    return Deployment(name=hardware.name, profile=profile, drafter=drafter, room=room, num_gpus=measured.num_gpus)
