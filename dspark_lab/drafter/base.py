"""The LightningModule that all drafters share: borrowed matrices, the training step, the walk over chunks.

An algorithm adds ``forward`` (the network up to hidden states), ``head`` (hidden states -> draft logits), ``own_loss_terms``
if it has any, and ``propose`` (inference). ``loss`` and ``propose`` share ``head``.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.export import register_dataclass
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from dspark_lab.data.vocabulary import DraftVocabulary
from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.drafter.attention_kinds import NO_LATENTS, AnyAttention, LatentAttention
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.divergences import Divergences, diverge
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.losses import LossTerms, walk_chunks
from dspark_lab.drafter.objective import Loss, normalisation
from dspark_lab.evaluation.acceptance import AcceptanceLengthEstimate
from dspark_lab.records import Batch, Proposal, Sampling, TargetSpec
from dspark_lab.target.protocol import TargetHead
from dspark_lab.training.collectives import sum_over_ranks
from dspark_lab.training.lr_schedules import LrSchedule
from dspark_lab.training.optimizers import OptimizerRecipe
from dspark_lab.training.sharding import shard


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Supervised slots in whole blocks: A blocks (EAGLE-3: chains) of S predicting slots (EAGLE-3: steps).

    ``target_states`` are the target's last hidden states, before its final norm, of the batch's N tokens; ``teacher`` says
    which token predicts a slot's label. Slots share tokens, so their target logits are computed once.
    """

    hidden: Tensor  # [A, S, H], normed: ready for the head
    previous_token_ids: Tensor  # int64 [A, S] target ids: the true token before each label
    labels: Tensor  # int64 [A, S] target ids
    supervised: Tensor  # bool [A, S]
    teacher: Tensor  # int64 [A, S] index into target_states
    target_states: Tensor  # [N, H]

    @property
    def teacher_hidden(self) -> Tensor:
        """[A, S, H]."""
        return self.target_states[self.teacher]

    def __getitem__(self, blocks: slice) -> "DraftOutput":
        own = ("hidden", "previous_token_ids", "labels", "supervised", "teacher")
        return replace(self, **{name: getattr(self, name)[blocks] for name in own})

    def with_hidden(self, hidden: Tensor) -> "DraftOutput":
        return replace(self, hidden=hidden)


register_dataclass(DraftOutput)  # a pytree: FSDP2 looks into what forward returns


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What a drafter has of its target: facts, frozen matrices, and which of its tokens it drafts."""

    target: TargetSpec
    head: TargetHead
    vocabulary: DraftVocabulary


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is trained, whatever its algorithm. ``seed`` keys its anchors."""

    loss: Loss
    optimizer: OptimizerRecipe
    lr_schedule: LrSchedule
    seed: int


class Drafter(L.LightningModule):
    """Base of all drafters.

    ``target_head`` and the rows of its vocabulary matrix for the draft vocabulary are plain attributes: frozen, in no
    state dict, no gradient bucket and no broadcast; ``_apply`` moves them with the module.

    ``checkpoint_format``: how ``export`` writes it; it counts for the very class that says it, since a derived one may hold
    more than its base. None: it has no format, and ``export`` refuses it.
    """

    checkpoint_format: ClassVar[CheckpointFormat | None] = None

    num_draft_tokens: int  # tokens that one proposal holds at most
    chained = False  # whether the slots of a block are steps of a chain (EAGLE-3)
    takes_latents = False  # whether ``attention`` may be latent
    decays: Tensor

    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        num_slots: int,
        attention: AnyAttention | None,
        head_chunk_tokens: int,
        own_terms: frozenset[str] = frozenset(),
    ) -> None:
        """``num_slots``: that predict in a block; ``attention`` None: the target's; ``own_terms``: of ``own_loss_terms``."""
        super().__init__()
        if isinstance(attention, LatentAttention) and not self.takes_latents:
            raise ValueError(f"{type(self).__name__}: {NO_LATENTS}")
        self.target = attention.instead_of(borrowed.target) if attention else borrowed.target
        self.target_head, self.vocabulary = borrowed.head, borrowed.vocabulary
        lm_head = self.target_head.lm_head
        self.draft_rows = lm_head if self.vocabulary.is_full else lm_head[self.vocabulary.draft_to_target]
        self.head_rows = self.draft_rows  # a head of its own only in an imported EAGLE-3, whose authors train it
        self.recipe = recipe
        self.head_chunk_tokens = head_chunk_tokens
        self.objective = recipe.loss.objective_of(type(self))
        self.objective.check_terms(type(self).__name__.lower(), own_terms)
        self.own_terms = own_terms
        self.register_buffer("decays", self.objective.decays(num_slots), persistent=False)
        self.window: list[Tensor] = []  # sums of the losses since the last optimizer step
        self.val_loss = MeanMetric()
        self.acceptance_estimate = AcceptanceLengthEstimate()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        super()._apply(fn, recurse)
        shared, own = self.draft_rows is self.target_head.lm_head, self.head_rows is not self.draft_rows
        self.target_head = self.target_head.map(fn)
        self.draft_rows = self.target_head.lm_head if shared else fn(self.draft_rows)
        self.head_rows = fn(self.head_rows) if own else self.draft_rows
        self.vocabulary = self.vocabulary.to(self.draft_rows.device)
        return self

    @abstractmethod
    def forward(self, batch: Batch) -> DraftOutput: ...

    def head(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        """Draft logits [..., V_d] of normed states [..., H]; the previous tokens matter only to order-aware heads."""
        return F.linear(hidden, self.head_rows.to(hidden.dtype))

    def loss(self, output: DraftOutput, batch: Batch) -> LossTerms:
        """The objective's terms, summed over the supervised slots chunk by chunk of whole blocks."""
        active = self.objective.active
        factor, denominator = normalisation(
            self.recipe.loss.normalizer,
            self.decays,
            output.supervised,
            chained=self.chained,
            num_tokens=batch.token_ids.numel(),
        )

        def summands(blocks: slice, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            chunk = output[blocks].with_hidden(hidden)
            divergences = self.divergences(chunk)
            weights = factor * self.objective.slot_weights(self.decays, chunk.supervised, divergences.label_probability)
            if self.objective.outside == "mask" and not self.vocabulary.is_full:
                weights = weights * self.vocabulary.t2d[self.target_argmax(chunk)]
            value = (weights * divergences.total).sum()
            sums = {name: (weights * divergences.values[name]).sum() for name in active if name not in self.own_terms}
            for name, term in self.own_loss_terms(chunk, divergences).items():
                sums[name] = (weights * term).sum()
                value = value + active[name] * sums[name]
            return value, {name: sums[name] for name in active}

        return walk_chunks(
            summands,
            output.hidden,
            terms=list(active),
            denominator=denominator,
            parameters=[p for module in self.head_modules() for p in module.parameters()],
            chunk_blocks=self._chunk_blocks(output),
        )

    def own_loss_terms(self, chunk: DraftOutput, divergences: Divergences) -> dict[str, Tensor]:
        """The terms in ``own_terms``, per slot [A, S]."""
        return {}

    def divergences(self, chunk: DraftOutput) -> Divergences:
        """How far q is from p in each slot; with ``own_terms`` also TV, from which acceptance follows."""
        weights = self.objective.divergences(self.own_terms)
        labels, counted = None, None
        if self.objective.labels == "data":
            labels, counted = self.vocabulary.to_draft(chunk.labels)
        logits = self.loss_logits(chunk)
        teacher_logits, row = None, chunk.teacher
        if labels is None or self.own_terms or weights.keys() != {"ce"}:
            tokens, row = chunk.teacher.unique(return_inverse=True)
            teacher_logits = self.teacher_logits(chunk.target_states[tokens])
        return diverge(
            logits,
            teacher_logits,
            row,
            weights=weights,
            labels=labels,
            counted=None if self.vocabulary.is_full else counted,
            also=frozenset({"tv"} if self.own_terms else ()),
        )

    def loss_logits(self, chunk: DraftOutput) -> Tensor:
        """Draft logits [A, S, V_d] that the divergences measure: those of ``head``, which ``propose`` draws from."""
        return self.head(chunk.hidden, chunk.previous_token_ids)

    @abstractmethod
    def propose(
        self,
        contexts: Sequence[DraftContext],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: Tensor | None = None,
    ) -> Proposal: ...

    def teacher_logits(self, teacher_hidden: Tensor) -> Tensor:
        """Target logits on the draft vocabulary, [..., V_d]."""
        return F.linear(self.target_head.norm(teacher_hidden.to(self.draft_rows.dtype)), self.draft_rows)

    def target_argmax(self, chunk: DraftOutput) -> Tensor:
        """The target's most likely token over its whole vocabulary, target ids [A, S]."""
        tokens, row = chunk.teacher.unique(return_inverse=True)
        return self.target_head.logits(chunk.target_states[tokens].to(self.draft_rows.dtype)).argmax(-1)[row]

    def head_modules(self) -> list[nn.Module]:
        """Modules with parameters that ``head`` or ``loss`` use after ``forward``."""
        return []

    def setup(self, stage: str) -> None:
        self.recipe.loss.check_batches(
            world_size=self.trainer.world_size, accumulate=self.trainer.accumulate_grad_batches
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = self.loss(self(batch), batch)
        self.window.append(torch.stack([terms.denominator, terms.numerator.detach(), *terms.sums.values()]))
        return terms.numerator

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Global normaliser: gradients of the sums, divided once by the sum of all weights of the optimizer step.

        Lightning has divided by the accumulated batches and DDP by the ranks. One small vector is all that is reduced.
        """
        sums = sum_over_ranks(torch.stack(self.window).sum(0))
        self.window.clear()
        denominator = sums[0].clamp(min=1e-6)
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / denominator
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        total, *terms = sums[1:] / denominator
        self.log("train/loss", total, prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in zip(self.objective.active, terms, strict=True)})

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm over all ranks; a step that a callback ``refuses`` changes no weight."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.log("train/gradient_norm", norm)
        loss = self.trainer.callback_metrics["train/loss"]
        guards = [guard for guard in self.trainer.callbacks if hasattr(guard, "refuses")]  # pyright: ignore
        if any(
            guard.refuses(step=self.trainer.global_step, loss=float(loss), gradient_norm=float(norm))
            for guard in guards
        ):
            optimizer.zero_grad(set_to_none=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self(batch)
        terms = self.loss(output, batch)
        self.val_loss.update(terms.total, weight=terms.denominator)
        self.log("val/loss", self.val_loss, batch_size=1)
        self.acceptance_estimate.update(self.agreement(output), output.supervised)
        self.log("val/acceptance_length_estimate", self.acceptance_estimate, prog_bar=True, batch_size=1)

    @torch.no_grad()
    def agreement(self, output: DraftOutput) -> Tensor:
        """bool [A, S]: the drafter's arg-max is the target's, teacher-forced.

        The target's arg-max is taken over its whole vocabulary: a token that the draft vocabulary lacks counts as missed.
        """
        agreed = [output.supervised.new_empty(0, output.supervised.shape[1])]
        step = self._chunk_blocks(output)
        for start in range(0, output.hidden.shape[0], step):
            chunk = output[start : start + step]
            drafted = self.vocabulary.to_target(self.head(chunk.hidden, chunk.previous_token_ids).argmax(-1))
            agreed.append(drafted == self.target_argmax(chunk))
        return torch.cat(agreed)

    def configure_model(self) -> None:
        """Lightning hands over a device mesh where the strategy shards (``trainer=fsdp``)."""
        if self.device_mesh is not None and not isinstance(self, FSDPModule):
            shard(self, self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        optimizer = self.recipe.optimizer.build(self)
        schedule = self.recipe.lr_schedule.build(optimizer, num_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _chunk_blocks(self, output: DraftOutput) -> int:
        return max(self.head_chunk_tokens // output.hidden.shape[1], 1)

    def choose(
        self, logits: Tensor, sampling: Sampling, generator: torch.Generator | None, forced: Tensor | None
    ) -> Proposal:
        """From draft logits [..., V_d]: tokens [...], when sampling their distributions [..., V], the largest of each."""
        if sampling.greedy:
            scores = logits.float()
            top = (scores.amax(-1) - scores.logsumexp(-1)).exp()
            return Proposal(
                self.vocabulary.to_target(logits.argmax(-1)) if forced is None else forced, top_probability=top
            )
        on_draft = probabilities(logits, sampling)
        token_ids = self.vocabulary.to_target(draw(on_draft, generator)) if forced is None else forced
        on_target = on_draft.new_zeros(*logits.shape[:-1], self.target.vocab_size)
        on_target[..., self.vocabulary.draft_to_target] = on_draft
        return Proposal(token_ids, on_target, top_probability=on_draft.amax(-1))

    def walk_slots(
        self,
        anchor_token_ids: Tensor,
        next_logits: Callable[[int, Tensor], Tensor],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None,
        forced_token_ids: Tensor | None,
    ) -> Proposal:
        """Draft left to right after anchors [R]: ``next_logits(k, previous tokens [R])`` -> [R, V_d]."""
        previous = anchor_token_ids
        slots: list[Proposal] = []
        for k in range(num_draft_tokens):
            forced = None if forced_token_ids is None else forced_token_ids[:, k]
            slots.append(self.choose(next_logits(k, previous), sampling, generator, forced))
            previous = slots[-1].token_ids
        if not slots:
            return Proposal(previous.new_empty(len(previous), 0))
        distributions = [slot.probabilities for slot in slots if slot.probabilities is not None]
        return Proposal(
            torch.stack([slot.token_ids for slot in slots], dim=1),
            torch.stack(distributions, dim=1) if distributions else None,
            top_probability=torch.stack(
                [slot.top_probability for slot in slots if slot.top_probability is not None], 1
            ),
        )

    def check_num_draft_tokens(self, num_draft_tokens: int) -> None:
        if not 0 <= num_draft_tokens <= self.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens} but this {type(self).__name__} drafts at most "
                f"{self.num_draft_tokens}; lower evaluate.num_draft_tokens or train with larger blocks"
            )

    def features(self, hidden_states: Tensor) -> Tensor:
        """Captured states [..., L, H] -> [..., L * H] in the drafter's precision."""
        return hidden_states.flatten(-2).to(next(self.parameters()).dtype)
