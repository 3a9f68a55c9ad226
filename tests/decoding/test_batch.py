from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from curves import Curve
from toy_language import (
    EOS,
    TableDrafter,
    ToyBatchVerifier,
    ToyVerifier,
    chi_square_p_value,
    one_thread,  # noqa: F401
    random_table,
    sequence_probabilities,
    toy_drafters,
)

from dspark_lab.decoding.batch import decode_batch
from dspark_lab.decoding.loop import plain_decode, speculative_decode
from dspark_lab.records import Sampling
from dspark_lab.scheduler.fixed import Fixed, NoDrafts
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.scheduler.oracle import Oracle
from dspark_lab.scheduler.threshold import Threshold

STEEP = Curve((0, 4096), (0.004, 4.1), draft_s=0.001)


def aware(mode, confidence="head"):
    return HardwareAware(hardware=STEEP, mode=mode, staleness=2, cost_curve="convex", confidence=confidence)


SCHEDULERS = {
    "none": lambda: NoDrafts(),
    "fixed": lambda: Fixed(num_verified_tokens=2),
    "whole": lambda: Fixed(num_verified_tokens=4),
    "threshold": lambda: Threshold(survival=0.3, confidence="head"),
    "early_stop": lambda: aware("early_stop"),
    "global_budget": lambda: aware("global_budget"),
}
GREEDY = Sampling(max_new_tokens=24)
PROMPTS = [torch.tensor(ids) for ids in ((1, 2), (3, 1, 4), (2, 2, 2, 2), (4, 1), (1, 1, 3))]


def batch(table, drafter, prompts=PROMPTS, *, scheduler="whole", sampling=GREEDY, **options):
    return decode_batch(
        ToyBatchVerifier(table),
        drafter,
        prompts,
        scheduler=SCHEDULERS[scheduler](),
        sampling=sampling,
        num_draft_tokens=0 if drafter is None else 4,
        eos_token_ids=(EOS,),
        **options,
    )


def plain(table, prompt, **options):
    return plain_decode(ToyVerifier(table), prompt, eos_token_ids=(EOS,), **options).token_ids


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["perfect", "noisy", "wrong"])
def test_greedy_texts_are_the_targets_own(name, scheduler):
    table = random_table(8, seed=3)
    decoded = batch(table, toy_drafters(table)[name], scheduler=scheduler)
    wanted = [plain(table, prompt, sampling=GREEDY) for prompt in PROMPTS]
    assert [each.token_ids for each in decoded] == wanted
    assert len({len(text) for text in wanted}) > 1  # so that some left before others
    for prompt, each in zip(PROMPTS, decoded, strict=True):
        position = len(prompt)
        for step in each.steps:
            assert step.position == position and 0 <= step.num_accepted <= step.num_draft_tokens
            assert step.confidence is not None and len(step.confidence) == step.num_draft_tokens
            position += step.num_accepted + 1


def test_without_a_drafter_it_is_plain_decoding():
    table = random_table(8, seed=3)
    decoded = batch(table, None, scheduler="none")
    assert [each.token_ids for each in decoded] == [plain(table, prompt, sampling=GREEDY) for prompt in PROMPTS]
    assert {step.num_draft_tokens for each in decoded for step in each.steps} == {0}


def test_alone_and_whole_it_is_the_single_loop():
    table = random_table(8, seed=3)
    for prompt in PROMPTS:
        (ours,) = batch(table, toy_drafters(table)["noisy"], [prompt])
        theirs = speculative_decode(
            ToyVerifier(table), toy_drafters(table)["noisy"], prompt, sampling=GREEDY, num_draft_tokens=4,
            eos_token_ids=(EOS,),
        )  # fmt: skip
        assert ours == theirs


def test_schedulers_are_obeyed():
    table = random_table(8, eos_bias=-50.0)
    hot = Sampling(temperature=1.0, max_new_tokens=24)  # greedy toy drafters are always sure
    lengths = {
        name: [
            step.num_draft_tokens
            for each in batch(table, TableDrafter(table), scheduler=name, sampling=hot)
            for step in each.steps
        ]
        for name in SCHEDULERS
    }
    assert set(lengths["fixed"]) == {2} and set(lengths["none"]) == {0}
    for name in ("threshold", "early_stop", "global_budget"):
        assert len(set(lengths[name])) > 1


SAMPLING = Sampling(temperature=0.9, max_new_tokens=3)
SMALL = random_table(3, seed=8, eos_bias=-0.5)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("scheduler", ["whole", "threshold", "early_stop", "global_budget"])
def test_sampled_texts_follow_the_target(scheduler, verification):
    prompts, generator = [torch.tensor([1, 2])] * 40, torch.Generator().manual_seed(0)
    counts = Counter()
    for _ in range(12):
        for each in batch(
            SMALL, toy_drafters(SMALL)["noisy"], prompts, scheduler=scheduler, sampling=SAMPLING,
            verification=verification, generator=generator,
        ):  # fmt: skip
            counts[each.token_ids] += 1
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), SAMPLING)) > 1e-3


def test_argmax_drafts_leave_the_sampled_texts_alone():
    counts = Counter()
    for each in batch(
        SMALL, TableDrafter(SMALL.flip(-1)), [torch.tensor([1, 2])] * 400, sampling=SAMPLING, draft_greedily=True,
        generator=torch.Generator().manual_seed(0),
    ):  # fmt: skip
        counts[each.token_ids] += 1
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), SAMPLING)) > 1e-3


def test_a_drafter_without_a_head_is_scheduled_by_its_probabilities_if_that_is_chosen():
    table = random_table(8, seed=3, eos_bias=-50.0)

    class Headless(TableDrafter):
        def propose(self, contexts, **options):
            return replace(super().propose(contexts, **options), confidence=None)

    def lengths(drafter, confidence):
        found = decode_batch(
            ToyBatchVerifier(table), drafter, PROMPTS, scheduler=aware("early_stop", confidence), num_draft_tokens=4,
            sampling=Sampling(temperature=1.0, max_new_tokens=24), eos_token_ids=(EOS,),
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return [step.num_draft_tokens for each in found for step in each.steps]

    # The toy's head says just that probability.
    assert lengths(Headless(table), "probability") == lengths(TableDrafter(table), "head")
    with pytest.raises(ValueError, match=r"set scheduler\.confidence=probability"):
        lengths(Headless(table), "head")


def test_the_oracle_cannot_decode():
    with pytest.raises(ValueError, match="simulate it"):
        decode_batch(
            ToyBatchVerifier(SMALL), None, PROMPTS, scheduler=Oracle(hardware=STEEP), sampling=GREEDY, num_draft_tokens=0,
            eos_token_ids=(EOS,),
        )  # fmt: skip


def test_the_load_names_requests_and_counts_their_context():
    seen = []

    class Watching(NoDrafts):
        confidence = "head"

        def draft_lengths(self, confidence, load, *, num_draft_tokens):
            seen.append((load.num_requests, load.num_context_tokens, load.request_ids.tolist()))
            assert confidence.shape == (load.num_requests, num_draft_tokens) and confidence.dtype == np.float64
            return super().draft_lengths(confidence, load, num_draft_tokens=num_draft_tokens)

    table = random_table(8, seed=3)
    decode_batch(
        ToyBatchVerifier(table), toy_drafters(table)["noisy"], PROMPTS, scheduler=Watching(), sampling=GREEDY,
        num_draft_tokens=4, eos_token_ids=(EOS,),
    )  # fmt: skip
    assert seen[0] == (5, sum(map(len, PROMPTS)), [0, 1, 2, 3, 4])
    assert seen[-1][0] < 5 and set(seen[-1][2]) < {0, 1, 2, 3, 4}
