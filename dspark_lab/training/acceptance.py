"""Acceptance of the drafter while it trains, and the early stop on it."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from pydantic import SkipValidation

from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_length
from dspark_lab.evaluation.decode import evaluate_decode
from dspark_lab.evaluation.replay import evaluate_replay
from dspark_lab.records import Sampling, TargetSample, TokenizedConversation
from dspark_lab.target.protocol import Target
from dspark_lab.validation import checked


class ReplayAcceptance(Callback):
    """``val/acceptance_length``: a few held-out greedy answers, replayed at every validation, no target forward."""

    @checked
    def __init__(
        self,
        *,
        conversations: Sequence[TokenizedConversation],
        read_sample: Callable[[str], TargetSample],
        num_conversations: int,
        seed: int,
    ) -> None:
        if num_conversations < 1:
            raise ValueError(f"num_conversations={num_conversations} must be at least 1")
        self.conversations = conversations[:num_conversations]
        self.read_sample, self.seed = read_sample, seed

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Drafter)
        result = evaluate_replay(
            pl_module,
            self.read_sample,
            self.conversations,
            sampling=Sampling(),
            num_draft_tokens=pl_module.num_draft_tokens,
            target_head=pl_module.target_head,
            eos_token_ids=pl_module.target.eos_token_ids,
            seed=self.seed,
        )
        pl_module.log(
            "val/acceptance_length", acceptance_length(result.traces), prog_bar=True, batch_size=1, sync_dist=True
        )


DECODE_ACCEPTANCE = "val/decode_acceptance_length"


class DecodeAcceptance(Callback):
    """``val/decode_acceptance_length``: real greedy decoding of a few held-out prompts, every so many validations.

    The target runs in this process. ``prompts`` end where the answer begins. ``chooses_best``: best checkpoint and early
    stop go by it, so every validation must have it.
    """

    @checked
    def __init__(
        self,
        *,
        target: Annotated[Target, SkipValidation],
        prompts: Sequence[TokenizedConversation],
        num_prompts: int,
        every_validations: int,
        chooses_best: bool,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        if chooses_best and every_validations != 1:
            raise ValueError(f"chooses_best=true with every_validations={every_validations}: set every_validations=1")
        if num_prompts < 1 or every_validations < 1:
            raise ValueError(
                f"num_prompts={num_prompts} and every_validations={every_validations} must be at least 1; leave the "
                "callback out to decode nothing"
            )
        self.target, self.prompts = target, prompts[:num_prompts]
        self.every_validations, self.seed = every_validations, seed
        self.sampling = Sampling(max_new_tokens=max_new_tokens)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Drafter)
        # By the step, not by counting: a resumed run does not repeat the validation that fell on its checkpoint.
        batches, between = trainer.global_step * trainer.accumulate_grad_batches, trainer.val_check_batch
        assert between
        if round(batches / between) % self.every_validations:
            return
        result = evaluate_decode(
            self.target,
            pl_module,
            self.prompts,
            sampling=self.sampling,
            num_draft_tokens=pl_module.num_draft_tokens,
            seed=self.seed,
        )
        pl_module.log(DECODE_ACCEPTANCE, acceptance_length(result.traces), batch_size=1, sync_dist=True)


class EarlyStop(EarlyStopping):
    """Ends training after ``patience`` validations in a row without ``monitor`` rising by more than ``min_delta``."""

    @checked
    def __init__(self, *, monitor: str, patience: int, min_delta: float) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience} must be at least 1 validation")
        super().__init__(
            monitor=monitor, patience=patience, min_delta=min_delta, mode="max", check_on_train_epoch_end=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning would take the checkpoint's patience: a resumed run could not be given more of it.
        super().load_state_dict({**state_dict, "patience": self.patience})
