"""What a run over several machines would do, before anything starts, and what makes it impossible.

Everything is arithmetic on data sheets and stated rates. A rate that nobody has measured on this machine is an assumption,
and the plan says so beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark_lab.cluster.plan.flow import GB, GIB, WINDOW_SHARE, Corpus, Rates, exchanged_bytes, samples_in_flight
from dspark_lab.cluster.plan.job import Job, Line
from dspark_lab.cluster.plan.memory import total_bytes, training_flops, training_memory
from dspark_lab.cluster.plan.placement import Node, Serving, place, serving
from dspark_lab.cluster.plan.words import words


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``figures``: the numbers, for programs; ``impossible``: why it cannot work, each with the number that breaks."""

    nodes: Sequence[Node]
    lines: Sequence[Line]
    figures: Mapping[str, float | str]
    memory: Mapping[str, float]
    impossible: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(job: Job) -> Plan:
    assumed, hardware, states = job.assumed, job.hardware, job.states
    found, impossible = _serving(job)
    rates = rates_of(job, found)
    longest = assumed.longest_sample_tokens or job.size.row_tokens
    corpus = Corpus(num_samples=job.num_samples, sample_tokens=assumed.sample_tokens, longest_tokens=longest)
    memory = training_memory(job.size, job.trainer)
    slowest, rate = rates.bottleneck(
        num_sets=job.num_sets, num_training_nodes=job.num_training_nodes, num_ranks=job.trainer.num_ranks
    )
    if job.segment_bytes is None and not job.live:
        slowest, rate = "training", job.num_training_nodes * rates.training_node
    step_tokens = job.size.row_tokens * job.trainer.rows_per_batch * job.accumulate * job.trainer.num_ranks
    figures: dict[str, float | str] = {
        "token_bytes": states.token_bytes,
        "row_bytes": states.sample_bytes(job.size.row_tokens),
        "longest_sample_bytes": states.sample_bytes(longest),
        "samples_in_flight": samples_in_flight(job.segment_bytes or 0, states.sample_bytes(job.size.row_tokens)),
        "training_bytes_per_gpu": total_bytes(memory),
        "hardware_bytes_per_gpu": hardware.memory_bytes,
        "training_tokens_per_s": job.num_training_nodes * rates.training_node,
        "transfer_tokens_per_s": job.trainer.num_ranks * rates.client,
        "bottleneck": slowest,
        "tokens_per_s": rate,
        "network_bytes_per_s": rate * states.token_bytes,
        "serving_gpus": found.num_gpus if found else 0,
        "serving_nodes": found.num_nodes if found else 0,
        "training_nodes": job.num_training_nodes,
        **rates.balance(num_sets=job.num_sets, num_training_nodes=job.num_training_nodes),
        "epoch_steps": corpus.num_tokens / step_tokens,
        "num_tokens": corpus.num_tokens,
        "hours": job.max_steps * step_tokens / rate / 3600,
        "disk_bytes": disk_bytes(job, corpus),
    }
    figures["exchanged_bytes_per_step"] = exchanged_bytes(
        num_parameters=job.size.num_parameters, num_ranks=job.trainer.num_ranks, sharded=job.trainer.sharded
    )
    if assumed.answer_tokens_per_s is not None:
        figures["answer_hours"] = corpus.num_tokens / (job.num_sets * assumed.answer_tokens_per_s) / 3600
    impossible += refusals(job, found, figures)
    nodes = place(
        found,
        hardware,
        num_sets=job.num_sets,
        num_training_nodes=job.num_training_nodes,
        num_ranks=job.trainer.num_ranks,
        captures=job.captures,
        one_machine=job.one_machine,
    )
    return Plan(
        nodes=nodes,
        lines=words(job, found, rates, figures, memory),
        figures=figures,
        memory=memory,
        impossible=impossible,
    )


def _serving(job: Job) -> tuple[Serving | None, list[str]]:
    if job.target is None:
        return None, []
    try:
        return serving(job.hardware, job.target, memory_utilisation=job.assumed.memory_utilisation), []
    except ValueError as error:
        return None, [f"target: {error}"]


def rates_of(job: Job, found: Serving | None) -> Rates:
    peak = job.hardware.flops.get("bf16") or max(job.hardware.flops.values())
    row_s = training_flops(job.size) / (job.assumed.training_flops_share * peak)
    ranks_of_node = job.trainer.num_ranks / job.num_training_nodes
    capture = job.assumed.capture_tokens_per_s
    if capture is None and found is not None and job.target is not None:
        capture = (
            job.assumed.prefill_flops_share
            * found.num_gpus
            * job.hardware.flops.get(job.target.compute, peak)
            / (2 * job.target.active_parameters)
        )
    return Rates(
        capture=capture if job.live else None,
        training_node=ranks_of_node * job.size.row_tokens / row_s,
        client=job.assumed.client_bytes_per_s / job.states.token_bytes,
    )


def disk_bytes(job: Job, corpus: Corpus) -> float:
    """Checkpoints (three at a time, with the optimizer's state) and, where states are kept, all of them."""
    checkpoint = 4 * (
        2 * job.size.num_parameters + job.size.num_muon + 2 * (job.size.num_parameters - job.size.num_muon)
    )
    return 3 * checkpoint + (0 if job.live else corpus.num_tokens * job.states.token_bytes)


def refusals(job: Job, found: Serving | None, figures: Mapping[str, float | str]) -> list[str]:
    """Why it cannot work, each with the number that breaks and the mend."""
    said = []
    assumed, hardware = job.assumed, job.hardware
    number = {name: value for name, value in figures.items() if not isinstance(value, str)}
    if number["training_bytes_per_gpu"] > hardware.memory_bytes:
        said.append(
            f"training takes {number['training_bytes_per_gpu'] / GB:.1f} GB on a GPU of {hardware.memory_bytes / GB:.1f} "
            "GB: lower data.rows_per_batch, drafter.num_anchors, drafter.head_chunk_tokens or data.row_tokens, or use "
            "trainer=fsdp"
        )
    if found is not None and job.captures and job.gpus_per_set is not None and job.gpus_per_set < found.num_gpus:
        said.append(
            f"the target takes {found.num_gpus} GPUs of {hardware.memory_bytes / GB:.0f} GB, a set has {job.gpus_per_set}: "
            f"raise cluster.nodes_per_set to {found.num_nodes} nodes of {hardware.gpus_per_node}"
        )
    if found is not None:
        needed = found.context_bytes(num_sequences=assumed.sequences, num_tokens=job.size.row_tokens)
        if needed > found.room.free_bytes:
            said.append(
                f"{assumed.sequences} sequences of {job.size.row_tokens:,} tokens take {needed / GB:.1f} GB on a serving "
                f"GPU with {found.room.free_bytes / GB:.1f} GB beside the weights: lower plan.sequences or data.row_tokens"
            )
    if job.segment_bytes is not None:
        said += _transport_refusals(job, number)
    return said


def _transport_refusals(job: Job, number: Mapping[str, float]) -> list[str]:
    said = []
    assert job.segment_bytes is not None
    longest = job.assumed.longest_sample_tokens or job.size.row_tokens
    if number["longest_sample_bytes"] > job.assumed.buffer_bytes:
        said.append(
            f"a sample of {longest:,} tokens has {number['longest_sample_bytes'] / GIB:.2f} GiB of states, more than a "
            f"buffer of {job.assumed.buffer_bytes / GIB:.2f} GiB (plan.buffer_bytes): make samples shorter or buffers larger"
        )
    window = min(job.window_bytes or float("inf"), WINDOW_SHARE * job.segment_bytes)
    rows = job.trainer.rows_per_batch * job.accumulate * job.trainer.num_ranks
    step = rows * max(number["row_bytes"], number["longest_sample_bytes"])
    if step > window:
        said.append(
            f"an optimizer step of {rows} rows holds {step / GIB:.1f} GiB of states until it is over, the window of "
            f"Mooncake's {job.segment_bytes / GIB:.1f} GiB is {window / GIB:.1f} GiB: give the segments more memory, or "
            "lower trainer.accumulate, data.rows_per_batch or data.row_tokens"
        )
    return said
