"""Real decoding while training, and the early stop."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from fitting import RESUMING, fit
from lightning.pytorch.callbacks import Callback
from tiny_world import build, document

from dspark_lab.evaluation.decode import DecodeResult, prompt_only
from dspark_lab.records import Sampling, TokenizedConversation, Trace, VerifyStep
from dspark_lab.training import acceptance
from dspark_lab.training.acceptance import DECODE_ACCEPTANCE, DecodeAcceptance, EarlyStop
from dspark_lab.training.checkpoints import model_checkpoints

pytestmark = RESUMING


def conversation(name: str) -> TokenizedConversation:
    sample = document("000110", seed=1)
    return TokenizedConversation(name, sample.token_ids, sample.loss_mask, "sums", Sampling())


class Decoding:
    """Stands for ``evaluate_decode``: notes its arguments; three of four drafted tokens are accepted."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, target: Any, drafter: Any, prompts: Any, **how: Any) -> DecodeResult:
        self.calls.append({"target": target, "training": drafter.training, "prompts": prompts, **how})
        return DecodeResult((Trace("a", "sums", (VerifyStep(3, 4, 3),), 5),), None, None)


def decode_acceptance(**overrides: Any) -> DecodeAcceptance:
    prompts = [prompt_only(conversation(name)) for name in "abc"]
    settings = {"num_prompts": 2, "every_validations": 2, "chooses_best": False, "max_new_tokens": 9, "seed": 3}
    return DecodeAcceptance(target="the target", prompts=prompts, **{**settings, **overrides})  # pyright: ignore


def test_a_prompt_ends_where_the_answer_begins():
    prompt = prompt_only(conversation("a"))
    assert prompt.token_ids.tolist() == conversation("a").token_ids[:3].tolist()
    assert (prompt.id, prompt.domain, bool(prompt.loss_mask.any())) == ("a", "sums", False)


def test_decoding_at_every_other_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decoding = Decoding()
    monkeypatch.setattr(acceptance, "evaluate_decode", decoding)
    drafter = build("dspark")
    trainer = fit(drafter, tmp_path, [decode_acceptance()], steps=6)  # validations after 2, 4 and 6
    (call,) = decoding.calls
    assert call["target"] == "the target" and not call["training"]
    assert [prompt.id for prompt in call["prompts"]] == ["a", "b"]
    assert call["sampling"] == Sampling(max_new_tokens=9) and call["seed"] == 3
    assert call["num_draft_tokens"] == drafter.num_draft_tokens
    assert float(trainer.callback_metrics["val/decode_acceptance_length"]) == 4.0
    fit(build("dspark"), tmp_path, [decode_acceptance()], steps=8, resume=True)  # the fourth validation
    assert len(decoding.calls) == 2


@pytest.mark.parametrize("key", ["num_prompts", "every_validations"])
def test_at_least_one(key: str):
    with pytest.raises(ValueError, match=f"{key}=0"):
        decode_acceptance(**{key: 0})


def test_the_best_checkpoint_may_go_by_real_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptance, "evaluate_decode", Decoding())
    _, best = model_checkpoints(tmp_path / "chosen", DECODE_ACCEPTANCE, every_steps=9)
    fit(build("dspark"), tmp_path, [decode_acceptance(every_validations=1), best], steps=2)
    assert best.best_model_score == 4.0 and (tmp_path / "chosen" / "best.ckpt").exists()
    with pytest.raises(ValueError, match="set every_validations=1"):
        decode_acceptance(chooses_best=True)


class Scores(Callback):
    """Logs a made-up acceptance at each validation."""

    def __init__(self, *scores: float) -> None:
        self.scores = list(scores)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val/acceptance_length", self.scores.pop(0), batch_size=1)


def early_stop(patience: int) -> EarlyStop:
    return EarlyStop(monitor="val/acceptance_length", patience=patience, min_delta=0.05)


def test_training_ends_when_acceptance_no_longer_rises(tmp_path: Path):
    scores = Scores(1.2, 1.5, 1.54, 1.4, 1.9, 1.9)
    trainer = fit(build("dflash"), tmp_path, [scores, early_stop(2)], steps=12)
    assert trainer.global_step == 8


def test_a_resumed_run_may_be_given_more_patience(tmp_path: Path):
    fit(build("dflash"), tmp_path, [Scores(1.5, 1.4, 1.3), early_stop(2)], steps=12)
    trainer = fit(build("dflash"), tmp_path, [Scores(1.3, 1.3, 1.3), early_stop(4)], steps=20, resume=True)
    # last.ckpt was written before the validation of its step: one without a rise is on record, three more follow.
    assert trainer.global_step == 12


def test_patience_is_at_least_one():
    with pytest.raises(ValueError, match="patience=0"):
        early_stop(0)
