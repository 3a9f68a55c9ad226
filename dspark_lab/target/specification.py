"""A target as data: its ``TargetSpec`` from the config, the tokenizer and the files' identity; no weights are read."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from dspark_lab.records import TargetSpec
from dspark_lab.target.chat import template_hash
from dspark_lab.target.resolve import Resolved


def build_spec(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    resolved: Resolved,
    *,
    name: str,
    model: str,
    layer_ids: Sequence[int] | None,
    mask_token_id: int | None,
    enable_thinking: bool | None = None,
    generation_config: GenerationConfig | None = None,
) -> TargetSpec:
    """Describe a decoder-only model of the Llama family (RMS norms, rotary positions).

    Raises:
        ValueError: layer ids or mask token id that the target cannot have.
    """
    text: Any = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    eos_token_ids = _eos_token_ids(text, tokenizer, generation_config)
    return TargetSpec(
        name=name,
        model=model,
        revision=resolved.revision,
        fingerprint=resolved.fingerprint,
        template_hash=template_hash(tokenizer, enable_thinking=enable_thinking),
        architecture=(config.architectures or [type(config).__name__])[0],
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters or {}),
        layer_ids=resolve_layer_ids(layer_ids, num_layers=num_layers),
        mask_token_id=resolve_mask_token_id(
            mask_token_id, tokenizer=tokenizer, vocab_size=text.vocab_size, eos_token_ids=eos_token_ids
        ),
        eos_token_ids=eos_token_ids,
    )


def resolve_layer_ids(layer_ids: Sequence[int] | None, *, num_layers: int) -> tuple[int, ...]:
    """Check entering-layer ids; None means speculators' default [2, n//2, n-3].

    Id n (the state after the last layer) is refused: every sample stores it anyway, as ``last_hidden_state``.
    """
    if layer_ids is None:
        ids = (2, num_layers // 2, num_layers - 3)
        if not 2 < num_layers // 2 < num_layers - 3:
            raise ValueError(
                f"target.layer_ids: the default [2, n//2, n-3] = {list(ids)} needs a deeper target than {num_layers} "
                f"layers; give increasing ids within 0..{num_layers - 1}"
            )
        return ids
    ids = tuple(layer_ids)
    if not ids or min(ids) < 0 or max(ids) >= num_layers:
        raise ValueError(
            f"target.layer_ids={list(ids)} must lie within 0..{num_layers - 1} (states entering these layers); "
            f"the state after the last layer is stored without being asked for"
        )
    if list(ids) != sorted(set(ids)):
        raise ValueError(
            f"target.layer_ids={list(ids)} must be strictly increasing, without repeats: {sorted(set(ids))}"
        )
    return ids


def resolve_mask_token_id(
    mask_token_id: int | None,
    *,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> int:
    """The given id, else the tokenizer's mask token, else the first embedding row that the tokenizer does not use.

    The order is speculators'; its last resort (pad, eos or unk) is refused, since a drafter would learn that the end of
    a turn is a slot to fill.
    """
    source = "target.mask_token_id"
    if mask_token_id is None and tokenizer.mask_token_id is not None:
        mask_token_id, source = tokenizer.mask_token_id, "the tokenizer's mask token"
    if mask_token_id is None:
        mask_token_id, source = len(tokenizer), "the first row after the tokenizer's vocabulary"
        if mask_token_id >= vocab_size:
            raise ValueError(
                f"target.mask_token_id is not given, the tokenizer has no mask token and the embedding no spare row "
                f"({vocab_size} rows): name a token that conversations never contain"
            )
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"{source}={mask_token_id} lies outside the embedding (rows 0..{vocab_size - 1})")
    for role, ids in [("pad", (tokenizer.pad_token_id,)), ("eos", tuple(eos_token_ids))]:
        if mask_token_id in ids:
            raise ValueError(
                f"{source}={mask_token_id} is the target's {role} token: name a token that conversations never contain"
            )
    return mask_token_id


def refuse_too_long(spec: TargetSpec, conversation_id: str, num_tokens: int) -> None:
    """Raises ValueError for more tokens than the target has positions."""
    limit = spec.max_position_embeddings
    if num_tokens > limit:
        raise ValueError(
            f"conversation {conversation_id!r} needs {num_tokens} tokens; the target {spec.name} has {limit} positions"
        )


def _eos_token_ids(
    config: Any, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's (Llama 3 lists three), the config's, the tokenizer's."""
    found: list[Any] = []
    for value in (getattr(generation_config, "eos_token_id", None), config.eos_token_id, tokenizer.eos_token_id):
        found.extend(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    if not found:
        raise ValueError("the target names no end-of-text token in its generation config, config or tokenizer")
    return tuple(dict.fromkeys(found))
