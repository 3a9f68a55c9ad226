"""A plan's figures in words, each with where it comes from."""

from collections.abc import Mapping

from dspark_lab.cluster.plan.flow import GB, GIB, Rates
from dspark_lab.cluster.plan.job import Job, Line
from dspark_lab.cluster.plan.placement import Serving

Figures = Mapping[str, float | str]


def words(job: Job, found: Serving | None, rates: Rates, figures: Figures, memory: Mapping[str, float]) -> list[Line]:
    return [
        *_serving(job, found),
        *(Line(section="training memory", name=holder, told=_bytes(held)) for holder, held in memory.items()),
        Line(
            section="training memory",
            name="of one GPU",
            told=f"{_bytes(_number(figures, 'training_bytes_per_gpu'))} of {_bytes(job.hardware.memory_bytes)}",
            because=f"{job.size.num_parameters / 1e9:.2f}e9 parameters of the drafter's own, "
            f"{2 * job.size.vocab_size * job.size.hidden_size / 1e9:.2f}e9 borrowed; {job.hardware.name}",
        ),
        *_states(job, figures),
        *_rates(job, rates, figures),
        *_exchange(job, figures),
        *_whole(job, figures),
    ]


def _serving(job: Job, found: Serving | None) -> list[Line]:
    if found is None or job.target is None:
        return [Line(section="serving", name="target", told="not known", because="target.serving is null")]
    whole = job.target.weights_bytes(1) / GB
    context = found.context_bytes(num_sequences=job.assumed.sequences, num_tokens=job.size.row_tokens) / GB
    return [
        Line(
            section="serving",
            name="GPUs of one set",
            told=f"{found.num_gpus} on {found.num_nodes} node{'s' * (found.num_nodes > 1)}",
            because=f"{whole:,.0f} GB of weights, {job.assumed.memory_utilisation:.0%} of "
            f"{job.hardware.memory_bytes / GB:.0f} GB a GPU, {job.hardware.gpus_per_node} GPUs a node",
        ),
        Line(section="serving", name="weights on a GPU", told=f"{found.weights_bytes / GB:.1f} GB"),
        Line(
            section="serving",
            name="context on a GPU",
            told=f"{context:.1f} of {found.room.free_bytes / GB:.1f} GB that are left",
            because=f"{job.assumed.sequences} sequences of {job.size.row_tokens:,} tokens",
        ),
    ]


def _states(job: Job, figures: Figures) -> list[Line]:
    states = job.states
    lines = [
        Line(
            section="states",
            name="a token",
            told=f"{states.token_bytes:,} bytes",
            because=f"({states.num_layers} + 1) x {states.hidden_size} x {states.number_bytes}",
        ),
        Line(
            section="states",
            name=f"a row of {job.size.row_tokens:,} tokens",
            told=_bytes(_number(figures, "row_bytes")),
        ),
        Line(
            section="states",
            name="would be saved",
            told=f"{states.saved_by(num_layers=3):.0%} by three layers, {states.saved_by(number_bytes=1):.0%} by fp8",
        ),
    ]
    if job.segment_bytes is not None:
        lines.append(
            Line(
                section="states",
                name="in flight",
                told=f"{_number(figures, 'samples_in_flight'):.0f} samples of a row's length",
                because=f"Mooncake's segments of {job.segment_bytes / GIB:.0f} GiB, of which it uses 90 %",
            )
        )
        need = _number(figures, "network_bytes_per_s")
        card = job.hardware.network_bytes_per_s
        nodes = job.num_training_nodes * job.hardware.gpus_per_node
        lines.append(
            Line(
                section="states",
                name="network",
                told=f"{_bytes(need)}/s"
                + (f", {need / (card * nodes):.1%} of the cards of the training nodes" if card else ""),
                because=f"a rank is assumed to read {job.assumed.client_bytes_per_s / GB:g} GB/s (plan.client_bytes_per_s)",
            )
        )
    return lines


def _exchange(job: Job, figures: Figures) -> list[Line]:
    """Between the ranks of training: over links where all of them are in one domain of these, else over cards."""
    hardware, num_ranks = job.hardware, job.trainer.num_ranks
    if num_ranks == 1:
        return []
    one_domain = job.num_training_nodes == 1 or hardware.link_domain > hardware.gpus_per_node
    linked = num_ranks <= hardware.link_domain and one_domain
    speed = hardware.link_bytes_per_s if linked else hardware.network_bytes_per_s
    sent = _number(figures, "exchanged_bytes_per_step")
    told = f"{_bytes(sent)} a step" + (f", {1000 * sent / speed:,.0f} ms at full speed" if speed else "")
    because = f"fp32 gradients of {num_ranks} ranks{' and weights' * job.trainer.sharded}, "
    because += f"links of {hardware.link_domain} GPUs" if linked else "the cards: they are in no one domain of links"
    return [Line(section="rates", name="each rank sends", told=told, because=because)]


def _rates(job: Job, rates: Rates, figures: Figures) -> list[Line]:
    stated = job.assumed.capture_tokens_per_s is not None
    training = Line(
        section="rates",
        name="training",
        told=f"{_number(figures, 'training_tokens_per_s'):,.0f} tokens/s",
        because=f"assumed {job.assumed.training_flops_share:.0%} of the bf16 peak (plan.training_flops_share)",
    )
    if rates.capture is None:
        unknown = Line(section="rates", name="capture", told="not known", because="target.serving is null")
        return [unknown, training] if job.live else [training]
    flip, sets = _number(figures, "flip_capture_tokens_per_s"), _number(figures, "sets_per_training_node")
    needed = int(_number(figures, "training_nodes_needed"))
    return [
        Line(
            section="rates",
            name="capture",
            told=f"{_number(figures, 'capture_tokens_per_s'):,.0f} tokens/s by {job.num_sets} set{'s' * (job.num_sets > 1)}",
            because="stated (plan.capture_tokens_per_s)"
            if stated
            else f"assumed {job.assumed.prefill_flops_share:.0%} of the peak (plan.prefill_flops_share)",
        ),
        training,
        Line(
            section="rates",
            name="all wait for",
            told=f"{figures['bottleneck']}, {_number(figures, 'tokens_per_s'):,.0f} tokens/s",
        ),
        Line(
            section="rates",
            name="training nodes",
            told=f"{job.num_training_nodes} planned, {needed} needed",
            because=f"follows from the two rates alone: above {flip:,.0f} captured tokens/s a set, or below "
            f"{_number(figures, 'capture_tokens_per_s') / job.num_training_nodes:,.0f} trained tokens/s a node, one more is "
            "needed",
        ),
        Line(
            section="rates",
            name="extraction : training",
            told=f"{max(sets, 0.01):.1f} sets to one training node keep both busy",
        ),
    ]


def _whole(job: Job, figures: Figures) -> list[Line]:
    lines = [
        Line(
            section="in all",
            name="samples",
            told=f"{job.num_samples:,} with {_number(figures, 'num_tokens') / 1e6:,.0f}M tokens",
            because=f"{job.assumed.sample_tokens:,.0f} tokens each, assumed (plan.sample_tokens)",
        ),
        Line(
            section="in all",
            name="steps",
            told=f"{job.max_steps:,}, {job.max_steps / _number(figures, 'epoch_steps'):.2f} epochs",
            because=f"an epoch is {_number(figures, 'epoch_steps'):,.0f} steps of "
            f"{job.trainer.rows_per_batch * job.accumulate * job.trainer.num_ranks} rows",
        ),
        _line("in all", "training", _number(figures, "hours"), "hours"),
        Line(
            section="in all",
            name="disk",
            told=_bytes(_number(figures, "disk_bytes")),
            because="three checkpoints" + ("" if job.live else " and all captured states"),
        ),
    ]
    if "answer_hours" in figures:
        hours = _line("in all", "regenerating answers", _number(figures, "answer_hours"), "hours at most")
        lines.insert(2, hours)
    return lines


def _line(section: str, name: str, value: float, unit: str) -> Line:
    return Line(section=section, name=name, told=f"{value:,.1f} {unit}")


def _bytes(value: float) -> str:
    return f"{value / GB:,.1f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


def _number(figures: Figures, name: str) -> float:
    value = figures[name]
    assert not isinstance(value, str)
    return value
