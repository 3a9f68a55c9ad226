"""Memory that training a drafter takes on one GPU (or CPU), by holder: arithmetic that a test compares with reality."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from dspark_lab.drafter.attention import CHUNK

FP32, BF16 = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSize:
    """A drafter as training sees it. ``num_queries``: slots of a row that pass the layers; ``num_slots``: that predict.

    ``num_context_tokens``: tokens of a row whose states become keys of every layer (EAGLE-3: none, its queries are).
    ``num_muon``: parameters that Muon steps, 0 for AdamW alone. ``num_head``: parameters that the loss uses after forward.
    """

    num_parameters: int
    num_muon: int
    num_head: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_captured: int  # states of a token that fc reads
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_attention: int  # weights of a layer's attention that a slot passes through
    num_key: int  # those that a context token does
    window: int | None
    row_tokens: int
    num_queries: int
    num_slots: int
    num_context_tokens: int
    chunk_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlace:
    """``sharded``: FSDP over all ranks; ``bf16``: mixed precision, else fp32; ``state_bytes``: of a captured number."""

    num_ranks: int
    sharded: bool
    rows_per_batch: int
    bf16: bool
    on_cpu: bool
    state_bytes: int = BF16


def training_memory(size: DrafterSize, place: TrainingPlace) -> dict[str, float]:
    """Bytes by holder while the loss of the last chunk is computed: the fullest moment of a step but the first."""
    shards = place.num_ranks if place.sharded else 1
    weights = FP32 * size.num_parameters
    optimizer = FP32 * (size.num_muon + 2 * (size.num_parameters - size.num_muon))
    held = {
        "drafter's weights": weights / shards,
        "gradients": weights / shards,
        "optimizer": optimizer / shards,
        "target's matrices": 2 * FP32 * size.vocab_size * size.hidden_size,
        "batch": place.rows_per_batch * batch_bytes(size, place),
        "activations": place.rows_per_batch * activation_bytes(size, place),
        "loss of a chunk": chunk_bytes(size, place),
        "gradients of the head": FP32 * (size.num_head + place.rows_per_batch * size.num_slots * size.hidden_size),
    }
    if place.sharded:
        held["gathered weights"] = weights
    if place.bf16:
        held["bf16 copies of weights"] = BF16 * size.num_parameters
    return held


def batch_bytes(size: DrafterSize, place: TrainingPlace) -> float:
    """Of a row on the device: captured states, the last one, ids."""
    return size.row_tokens * ((size.num_captured + 1) * size.hidden_size * place.state_bytes + 8 * 3)


def activation_bytes(size: DrafterSize, place: TrainingPlace) -> float:
    """What a row's backward pass needs. Inputs of norms are kept in fp32, inputs of matrix products in ``product`` bytes."""
    product = BF16 if place.bf16 else FP32
    hidden, inner = size.hidden_size, size.intermediate_size
    queries, keys = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    slot = FP32 * (2 * hidden + queries + keys) + product * (2 * hidden + 3 * queries + 2 * keys + 4 * inner)
    token = FP32 * keys + product * 2 * keys
    shared = size.row_tokens * (product * (size.num_captured + 1) * hidden + FP32 * hidden)
    output = 2 * FP32 * size.num_slots * hidden
    layers = size.num_layers * (size.num_queries * slot + size.num_context_tokens * token)
    return shared + layers + output + (size.num_layers * cpu_attention_bytes(size) if place.on_cpu else 0)


def cpu_attention_bytes(size: DrafterSize) -> float:
    """On CPU queries attend in chunks, each with its own copy of the keys that it may see, and a mask (``attention.py``)."""
    span = size.row_tokens * CHUNK / max(size.num_queries, 1)  # of the context between a chunk's first and last anchor
    seen = min(size.row_tokens, (size.window or size.row_tokens) + span)
    copies = size.num_queries / CHUNK * (seen + CHUNK) * 2 * size.num_kv_heads * size.head_dim * FP32
    mask = size.num_queries * (size.num_heads / size.num_kv_heads) * (seen + CHUNK) * FP32
    return copies + mask


def chunk_bytes(size: DrafterSize, place: TrainingPlace) -> float:
    """Logits of a chunk: draft and target, in fp32 tiles on CPU; on GPU also probabilities, their gradient, a difference."""
    logits = min(size.chunk_slots, place.rows_per_batch * size.num_slots) * size.draft_vocab_size
    density = size.num_slots / size.row_tokens
    distinct = (1 - exp(-density)) / density  # slots share the tokens that teach them
    if place.on_cpu:
        # A second tensor: the teacher's logits, or before it those without the Markov head's bias.
        return logits * FP32 * (2 if size.num_head else 1 + distinct)
    product = BF16 if place.bf16 else FP32
    # The vocabulary matrix in bf16 is a copy of the moment.
    matrix = BF16 * size.draft_vocab_size * size.hidden_size if place.bf16 else 0
    return logits * (product * (1 + distinct) + FP32 * (distinct + 4)) + matrix


def total_bytes(held: Mapping[str, float]) -> float:
    return sum(held.values())


def training_flops(size: DrafterSize) -> float:
    """Multiplications and additions of one row's step, forward and backward; frozen matrices have no gradient."""
    hidden, inner = size.hidden_size, size.intermediate_size
    queries = size.num_heads * size.head_dim
    slot = size.num_layers * (size.num_attention + 3 * hidden * inner)
    token = size.num_captured * hidden * hidden + size.num_layers * size.num_key
    seen = min(size.window or size.row_tokens, size.row_tokens)
    attention = size.num_layers * 2 * queries * seen
    vocabulary = size.draft_vocab_size * hidden
    density = size.num_slots / size.row_tokens
    teacher = (1 - exp(-density)) / density
    return (
        6 * (size.num_queries * (slot + attention) + size.row_tokens * token + size.num_slots * size.num_head / 2)
        + (4 + 2 * teacher) * size.num_slots * vocabulary
    )
