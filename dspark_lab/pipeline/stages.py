"""The stages. Each is a function of a run's parts and of what lies on disk; it can be run alone and taken up again.

They return what ``StageRecord`` says of a stage (accounting by reason) and the stage's metrics.
"""

from collections.abc import Callable, Mapping

from dspark_lab.pipeline.calibrate import calibrate
from dspark_lab.pipeline.capture import capture
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.doctor import doctor
from dspark_lab.pipeline.evaluate import evaluate
from dspark_lab.pipeline.export import export
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.plan import plan
from dspark_lab.pipeline.profile import profile
from dspark_lab.pipeline.regenerate import regenerate
from dspark_lab.pipeline.report import READERS, reading
from dspark_lab.pipeline.serve import serve
from dspark_lab.pipeline.simulate import simulate
from dspark_lab.pipeline.train import train

STAGES: Mapping[str, Callable[[Parts], Outcome]] = {
    "plan": plan,
    "doctor": doctor,
    "regenerate": regenerate,
    "capture": capture,
    "train": train,
    "evaluate": evaluate,
    "calibrate": calibrate,
    "export": export,
    "serve": serve,
    "profile": profile,
    "simulate": simulate,
    **{name: reading(name) for name in READERS},
}
"""In the order of the way through."""
