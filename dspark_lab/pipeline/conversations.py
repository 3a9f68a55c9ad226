"""The conversations of one run: prompts in splits, with the answers that they need, as samples of token ids."""

from collections.abc import Callable
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import torch

from dspark_lab.data.answers import AnswerBook, Assignment
from dspark_lab.data.corpus import Corpus
from dspark_lab.data.prompts import Splits, disjoint, to_prompt
from dspark_lab.data.reasoning import supervise_answers_alone
from dspark_lab.data.screening import OverlapCount, Screened, screen_answers, screen_prompts
from dspark_lab.evaluation.recipe import Benchmark, Evaluation, Serving
from dspark_lab.progress import console
from dspark_lab.records import Conversation, TokenizedConversation
from dspark_lab.target.chat import tokenize_maskable, tokenize_prompt
from dspark_lab.target.protocol import Target


class Conversations:
    """Each step is taken when it is first asked for. ``home``: where answers are kept."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        benchmark: Benchmark,
        evaluation: Evaluation,
        serving: Serving,
        target: Callable[[], Target],
        home: Path,
    ) -> None:
        self.corpus, self.benchmark, self.evaluation, self.serving = corpus, benchmark, evaluation, serving
        self.target, self.home = target, home

    @cached_property
    def splits(self) -> Splits:
        return self._screened_prompts[0]

    @property
    def prompt_overlap(self) -> OverlapCount:
        return self._screened_prompts[1]

    @cached_property
    def _screened_prompts(self) -> tuple[Splits, OverlapCount]:
        found, overlap = screen_prompts(
            disjoint(
                train=self.corpus.read(self.corpus.train),
                validation=self.corpus.read(self.corpus.validation),
                evaluation=map(to_prompt, self.benchmark.prompts),
            ),
            overlap=self.corpus.overlap,
        )
        for reason, count in found.dropped.items():
            console.print(f"prompts: {count} dropped ({reason})")
        return found, overlap

    @cached_property
    def assigned(self) -> dict[str, list[Assignment]]:
        """The answers that each split needs."""
        splits, mix = self.splits, self.corpus.mix
        greedy = self.corpus.greedy if mix else None
        return self._served() | {
            "train": mix.assign(splits.train, positions=splits.train_positions)
            if mix
            else [Assignment(conversation) for conversation in splits.train],
            "validation": [Assignment(conversation, greedy) for conversation in splits.validation],
            "evaluation": [Assignment(conversation, self.evaluation.sampling) for conversation in splits.evaluation],
        }

    @property
    def gate_split(self) -> str:
        """Of the answers that the serve gate replays."""
        return "evaluation" if self.serving.as_evaluated(self.evaluation) else "served"

    def _served(self) -> dict[str, list[Assignment]]:
        """Answers as the deployment samples them, for a gate by replay."""
        if "decode" in self.evaluation.modes or self.gate_split == "evaluation":
            return {}
        prompts = self.splits.evaluation[: self.serving.num_prompts]
        return {"served": [Assignment(prompt, self.serving.sampling) for prompt in prompts]}

    @cached_property
    def book(self) -> AnswerBook:
        spec = self.target().spec
        return AnswerBook(self.home / "answers", fingerprint=spec.fingerprint, template_hash=spec.template_hash)

    def answer(self, assignment: Assignment) -> Conversation | None:
        """The conversation with its answer, or None when it is still to be regenerated."""
        if assignment.sampling is None:
            return assignment.prompt
        return self.book.get(assignment.prompt, assignment.sampling, sample_index=assignment.sample_index)

    @cached_property
    def answered(self) -> dict[str, list[Conversation]]:
        """Every conversation of each split, with its answer."""
        answered = {}
        for split, assignments in self.assigned.items():
            found = [self.answer(assignment) for assignment in assignments]
            answered[split] = [conversation for conversation in found if conversation is not None]
            if len(answered[split]) < len(found):
                raise ValueError(
                    f"{len(found) - len(answered[split])} of {len(found)} {split} prompts have no answer yet: add "
                    "regenerate to stages"
                )
        return answered

    @cached_property
    def screened(self) -> Screened:
        """The training conversations whose answers are worth learning."""
        return screen_answers(
            self.answered["train"],
            evaluation=self.splits.evaluation,
            truncated=self.corpus.truncated,
            overlap=self.corpus.overlap,
            end_token_ids=self.target().spec.eos_token_ids,
            decode=lambda ids: str(self.target().tokenizer.decode(list(ids), skip_special_tokens=True)),
        )

    @property
    def kept(self) -> dict[str, list[Conversation]]:
        """What each split is made of."""
        return {**self.answered, "train": list(self.screened.kept)}

    @property
    def tokenized(self) -> dict[str, list[TokenizedConversation]]:
        """The samples of each split; a conversation gives several where its template rewrites earlier turns."""
        return {split: samples for split, (samples, _) in self._masked.items()}

    @cached_property
    def evaluation_prompts(self) -> list[TokenizedConversation]:
        """The benchmark's prompts, each rendered to ask for its answer; no answer need be there."""
        prompts = []
        for prompt in self.splits.evaluation:
            ids = tokenize_prompt(prompt.messages, self.target().tokenizer, enable_thinking=self.corpus.enable_thinking)
            nothing = torch.zeros(len(ids), dtype=torch.bool)
            prompts.append(TokenizedConversation(prompt.id, torch.tensor(ids), nothing, prompt.domain))
        return prompts

    @property
    def unmaskable(self) -> list[str]:
        """Why, of each conversation that is in no sample because the template cannot tell the assistant's tokens."""
        return [reason for _, reasons in self._masked.values() for reason in reasons]

    @cached_property
    def _masked(self) -> dict[str, tuple[list[TokenizedConversation], list[str]]]:
        tokenizer, thinking = self.target().tokenizer, self.corpus.enable_thinking
        masked = {
            split: tokenize_maskable(conversations, tokenizer, enable_thinking=thinking)
            for split, conversations in self.kept.items()
        }
        if self.corpus.reasoning_end is not None:
            end = tokenizer.encode(self.corpus.reasoning_end, add_special_tokens=False)
            for split in ("train", "validation"):
                samples, reasons = masked[split]
                masked[split] = supervise_answers_alone(samples, end), reasons
        return masked


def packaged(name: str) -> Path:
    """Path of answers that ship with the package."""
    path = Path(str(files("dspark_lab"))) / "assets" / f"{name}.jsonl.gz"
    if not path.exists():
        shipped = ", ".join(sorted(p.name.removesuffix(".jsonl.gz") for p in path.parent.glob("*.jsonl.gz"))) or "none"
        raise ValueError(f"data.packaged_answers={name!r} is not shipped (there is: {shipped}); set it to null")
    return path
