"""A Hugging Face causal language model in this process."""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dspark_lab.records import Conversation, Sampling, TargetSample, TargetSpec, TokenizedConversation
from dspark_lab.target.anatomy import Anatomy, borrow_head, dissect, read_head, recording
from dspark_lab.target.batch_verifier import HuggingFaceBatchVerifier
from dspark_lab.target.chat import template_hash, tokenize_prompt
from dspark_lab.target.facts import Facts
from dspark_lab.target.generation import generate_answers
from dspark_lab.target.precision import Dtype, resolve_device, resolve_dtype
from dspark_lab.target.protocol import TargetHead
from dspark_lab.target.resolve import Resolved, Source, resolve
from dspark_lab.target.specification import build_spec, refuse_too_long, resolve_layer_ids, resolve_mask_token_id
from dspark_lab.target.verifier import HuggingFaceVerifier, refuse_recurrent
from dspark_lab.validation import checked

log = logging.getLogger(__name__)


class HuggingFaceTarget:
    """Implements ``Target`` with transformers. Files are resolved, and weights loaded, when something needs them.

    Args:
        name: what reports call it.
        facts: of its config, instead of its own file: for a class that Transformers lacks.
        model: folder, shipped target or hub id. It and ``revision``, ``source``, ``package``, ``package_sha256`` are
            those of ``resolve``.
        layer_ids: states entering these decoder layers are captured; None: [2, n//2, n-3].
        mask_token_id: what unknown slots of a drafted block hold; None: see ``resolve_mask_token_id``.
        dtype: "auto" is bfloat16 where the hardware multiplies it, else float32.
        device: "auto" is CUDA where there is one.
        attention: transformers' attention implementation.
        batch_tokens: most tokens, padding included, of one capture forward.
        batch_size: prompts answered together.
        seed: of sampled answers; another seed gives other answers to the same prompts.
        enable_thinking: passed to the chat template; None leaves it to the template.
        home: cache root.
    """

    @checked
    def __init__(
        self,
        *,
        name: str,
        model: str,
        home: Path,
        revision: str | None = None,
        source: Source = "auto",
        package: str | None = None,
        package_sha256: str | None = None,
        layer_ids: tuple[int, ...] | None = None,
        mask_token_id: int | None = None,
        dtype: Dtype = "auto",
        device: str = "auto",
        attention: str = "sdpa",
        batch_tokens: int = 4096,
        batch_size: int = 32,
        seed: int = 0,
        enable_thinking: bool | None = None,
        facts: Facts | None = None,
    ) -> None:
        self.name, self.facts = name, facts
        self.model_name = model
        self.home = home.expanduser()
        self.revision = revision
        self.source: Source = source
        self.package = package
        self.package_sha256 = package_sha256
        self.layer_ids = layer_ids
        self.mask_token_id = mask_token_id
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.attention = attention
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        self.seed = seed
        self.enable_thinking = enable_thinking

    @cached_property
    def resolved(self) -> Resolved:
        return resolve(
            self.model_name,
            home=self.home,
            revision=self.revision,
            source=self.source,
            package=self.package,
            package_sha256=self.package_sha256,
        )

    @cached_property
    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.resolved.folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        trusted = self.facts is not None and self.facts.runs_tokenizer_code
        try:
            return AutoTokenizer.from_pretrained(self.resolved.folder, trust_remote_code=trusted)
        except ValueError as error:
            if trusted or "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"target.model={self.model_name!r}: its tokenizer is Python in its own repository, which is run for targets "
                "that say so alone: read it, then set target.facts.runs_tokenizer_code=true (the facts of a config as "
                "data: conf/target/kimi_k3.yaml)"
            ) from error

    @property
    def spec(self) -> TargetSpec:
        """Read from config (or facts) and tokenizer; no weights."""
        return self._spec if self.facts is None else self._told

    @cached_property
    def _spec(self) -> TargetSpec:
        has_file = (self.resolved.folder / "generation_config.json").is_file()
        return build_spec(
            self.config,
            self.tokenizer,
            self.resolved,
            name=self.name,
            model=self.model_name,
            layer_ids=self.layer_ids,
            mask_token_id=self.mask_token_id,
            enable_thinking=self.enable_thinking,
            generation_config=GenerationConfig.from_pretrained(self.resolved.folder) if has_file else None,
        )

    @cached_property
    def _told(self) -> TargetSpec:
        assert self.facts is not None
        facts = self.facts
        return facts.spec(
            name=self.name,
            model=self.model_name,
            layer_ids=resolve_layer_ids(self.layer_ids, num_layers=facts.num_layers),
            mask_token_id=resolve_mask_token_id(
                self.mask_token_id,
                tokenizer=self.tokenizer,
                vocab_size=facts.vocab_size,
                eos_token_ids=facts.eos_token_ids,
            ),
            revision=self.resolved.revision,
            fingerprint=self.resolved.fingerprint,
            template_hash=template_hash(self.tokenizer, enable_thinking=self.enable_thinking),
        )

    @cached_property
    def model(self) -> PreTrainedModel:
        """The whole network on its device, loaded by the first call that computes something."""
        log.info("Loading %s in %s on %s", self.name, self.dtype, self.device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.resolved.folder, dtype=self.dtype, attn_implementation=self.attention
        )
        model.generation_config = GenerationConfig()  # its file's top_k and penalties must not leak into our answers
        return model.to(self.device).eval().requires_grad_(False)

    @cached_property
    def _rolls_back(self) -> bool:
        refuse_recurrent(self.config)  # once: it builds the model's skeleton
        return True

    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return list(dissect(self.model).layers)

    def head(self) -> TargetHead:
        """Frozen matrices on the target's device in its dtype; shared with the network once that is loaded.

        Before, they are read from the files alone, where these hold them by name.
        """
        if "model" not in self.__dict__:
            if self.facts is not None and self.facts.tensors is not None:
                return self.facts.read_head(self.resolved.folder, dtype=self.dtype).to(self.device)
            head = read_head(self.resolved.folder, self.config, dtype=self.dtype)
            if head is not None:
                return head.to(self.device)
        return borrow_head(self.model)

    def verifier(self) -> HuggingFaceVerifier:
        """A fresh cache for one sequence.

        Raises:
            ValueError: the cache of this kind of model cannot roll back.
        """
        assert self._rolls_back
        return HuggingFaceVerifier(self.model, self.spec.layer_ids)

    def batch_verifier(self) -> HuggingFaceBatchVerifier:
        """A fresh cache for several sequences.

        Raises:
            ValueError: the cache of this kind of model cannot roll back, or has sliding windows.
        """
        assert self._rolls_back
        return HuggingFaceBatchVerifier(self.model, self.spec.layer_ids)

    def regenerate(self, prompts: Sequence[Conversation], *, sampling: Sampling) -> Iterator[Conversation]:
        """Answers in the target's own words, batch by batch. A sampled answer depends on seed and prompt id only."""
        with_ids = [
            (prompt, tokenize_prompt(prompt.messages, self.tokenizer, enable_thinking=self.enable_thinking))
            for prompt in prompts
        ]
        for prompt, ids in with_ids:
            refuse_too_long(self.spec, prompt.id, len(ids) + sampling.max_new_tokens)
        return generate_answers(
            self.model,
            with_ids,
            sampling=sampling,
            batch_size=self.batch_size,
            seed=self.seed,
            eos_token_ids=self.spec.eos_token_ids,
        )

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation, longest first; states on the CPU in the target's dtype.

        Raises:
            ValueError: states that are not finite, or a conversation longer than the target's positions.
        """
        for conversation in conversations:
            refuse_too_long(self.spec, conversation.id, len(conversation))
        return self._captured(conversations, anatomy=dissect(self.model))

    @torch.no_grad()
    def _captured(
        self, conversations: Sequence[TokenizedConversation], *, anatomy: Anatomy
    ) -> Iterator[tuple[str, TargetSample]]:
        for batch in batches_by_length(conversations, batch_tokens=self.batch_tokens):
            # No attention mask: padding lies to the right, where causal layers do not look.
            token_ids = torch.nn.utils.rnn.pad_sequence([c.token_ids for c in batch], batch_first=True)
            with recording(anatomy, self.spec.layer_ids) as recorded:
                anatomy.decoder(input_ids=token_ids.to(self.device), use_cache=False)
            states, last = recorded.take(self.spec.layer_ids)
            for row, conversation in enumerate(batch):
                yield conversation.key, _sample(conversation, states[row], last[row])

    def release(self) -> None:
        """Let go of the network's memory; what needs it loads it again."""
        self.__dict__.pop("model", None)
        gc.collect()
        torch.cuda.empty_cache()

    def take_events(self) -> Mapping[str, int]:
        """Nothing befalls a target in this process that is worth counting."""
        return {}


def batches_by_length(
    conversations: Sequence[TokenizedConversation], *, batch_tokens: int
) -> Iterator[list[TokenizedConversation]]:
    """Longest first, so that padding is small; at most ``batch_tokens`` with it, but at least one conversation."""
    batch: list[TokenizedConversation] = []
    for conversation in sorted(conversations, key=len, reverse=True):
        if batch and len(batch[0]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch


def _sample(conversation: TokenizedConversation, states: Tensor, last: Tensor) -> TargetSample:
    """Cut the padding off [longest, L, H] and [longest, H], into memory of its own."""
    num_tokens = len(conversation)
    states, last = states[:num_tokens].cpu().clone(), last[:num_tokens].cpu().clone()
    if not (states.isfinite().all() and last.isfinite().all()):
        raise ValueError(f"conversation {conversation.id!r}: the target's hidden states hold NaN or infinite values")
    return TargetSample(conversation.token_ids, conversation.loss_mask, states, last)
