"""What a plan is made from: the sizes of a job, and what is assumed where nobody has measured."""

from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from dspark_lab.cluster.plan.flow import States
from dspark_lab.cluster.plan.memory import DrafterSize, TrainingPlace
from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.hardware.served import ServedTarget
from dspark_lab.validation import checked


class Assumptions:
    """What no config says and a plan needs; measured on your machine, they make the plan yours.

    Args:
        capture_tokens_per_s: of one set of serving nodes; None: arithmetic at ``prefill_flops_share`` of the peak.
        training_flops_share: of the dense bf16 peak that training reaches.
        client_bytes_per_s: that one trainer rank reads from Mooncake.
        sample_tokens: prompt and answer, on average; ``longest_sample_tokens`` at most (None: a whole row).
        buffer_bytes: registered memory that a writer or a reader of Mooncake has: no sample may be larger.
        answer_tokens_per_s: that one set writes when it answers prompts; None: not known, and not counted in the hours.
        sequences: that a server works on at once.
        memory_utilisation: of a serving GPU.
    """

    @checked
    def __init__(
        self,
        *,
        capture_tokens_per_s: PositiveFloat | None,
        answer_tokens_per_s: PositiveFloat | None,
        prefill_flops_share: PositiveFloat,
        training_flops_share: PositiveFloat,
        client_bytes_per_s: PositiveFloat,
        sample_tokens: PositiveFloat,
        longest_sample_tokens: PositiveInt | None,
        buffer_bytes: PositiveInt,
        sequences: PositiveInt,
        memory_utilisation: PositiveFloat,
    ) -> None:
        self.answer_tokens_per_s = answer_tokens_per_s
        self.capture_tokens_per_s, self.prefill_flops_share = capture_tokens_per_s, prefill_flops_share
        self.training_flops_share, self.client_bytes_per_s = training_flops_share, client_bytes_per_s
        self.sample_tokens, self.longest_sample_tokens = sample_tokens, longest_sample_tokens
        self.buffer_bytes, self.sequences, self.memory_utilisation = buffer_bytes, sequences, memory_utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is planned.

    ``target`` None: nothing is known of what it weighs. ``live``: captured while training goes on; ``captures``: by servers.
    ``gpus_per_set``: that the cluster gives one set of servers, None: as many as the target needs.
    """

    hardware: Accelerator
    target: ServedTarget | None
    states: States
    size: DrafterSize
    trainer: TrainingPlace
    accumulate: int
    max_steps: int
    num_training_nodes: int
    num_sets: int
    one_machine: bool
    gpus_per_set: int | None
    num_samples: int
    segment_bytes: float | None  # of all Mooncake segments; None: nothing moves through Mooncake
    window_bytes: int | None
    live: bool
    captures: bool
    assumed: Assumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of the plan: ``section``, its name, the figure in words, and where it comes from."""

    section: str
    name: str
    told: str
    because: str = ""
