"""A target writing answers with transformers' ``generate``: batches of prompts, every setting explicit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dspark_lab.decoding.sampling import draw, probabilities, prompt_generator
from dspark_lab.records import Conversation, Sampling


class DrawEachPrompt(LogitsProcessor):
    """Makes ``generate``'s argmax a draw from ``probabilities(scores, sampling)`` with one random stream per prompt.

    transformers' own sampling has one stream per batch: an answer would depend on which others were still missing.
    """

    def __init__(self, sampling: Sampling, generators: Sequence[torch.Generator]) -> None:
        self.sampling = sampling
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] -> -inf everywhere but at the drawn token of each row."""
        distributions = probabilities(scores, self.sampling)
        drawn = [draw(row, generator) for row, generator in zip(distributions, self.generators, strict=True)]
        return torch.full_like(scores, -torch.inf).scatter_(-1, torch.stack(drawn)[:, None], 0.0)


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    prompts: Sequence[tuple[Conversation, list[int]]],
    *,
    sampling: Sampling,
    batch_size: int,
    seed: int,
    eos_token_ids: Sequence[int],
) -> Iterator[Conversation]:
    """Answers to (prompt, its token ids), longest prompts first. The end token that stopped an answer is part of it."""
    generator: Any = model  # generate is mixed into the classes that AutoModelForCausalLM returns
    longest_first = sorted(prompts, key=lambda prompt: (-len(prompt[1]), prompt[0].id))
    for start in range(0, len(longest_first), batch_size):
        batch = longest_first[start : start + batch_size]
        input_ids, attention_mask = _left_pad([ids for _, ids in batch], pad=eos_token_ids[0], device=model.device)
        processors = LogitsProcessorList()
        if not sampling.greedy:
            streams = [prompt_generator(seed, f"regenerate {prompt.id}", model.device) for prompt, _ in batch]
            processors.append(DrawEachPrompt(sampling, streams))
        output: Any = generator.generate(
            input_ids,
            attention_mask=attention_mask,
            logits_processor=processors,
            generation_config=GenerationConfig(
                do_sample=False,  # the processor above draws
                num_beams=1,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=list(eos_token_ids),
                pad_token_id=eos_token_ids[0],
                use_cache=True,
            ),
        )
        for (prompt, _), row in zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True):
            answer, stopped = _cut_after_end(row, eos_token_ids)
            yield replace(
                prompt,
                answer_token_ids=answer,
                sampling=sampling,
                finish="stop" if stopped else "length",
            )


def _left_pad(rows: Sequence[Sequence[int]], *, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids -> (ids, attention mask), both int64 [B, longest]."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _cut_after_end(row: Sequence[int], eos_token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """(answer up to and including its first end token, whether there was one)."""
    for index, token_id in enumerate(row):
        if token_id in eos_token_ids:
            return tuple(row[: index + 1]), True
    return tuple(row), False
