from dataclasses import replace

import pytest
import torch
from toy_language import EOS, TableDrafter, ToyTarget, ToyVerifier, one_thread, prompt, random_table, toy_drafters  # noqa: F401

from dspark_lab.decoding.loop import plain_decode
from dspark_lab.evaluation import decode
from dspark_lab.evaluation.decode import Mismatch, PromptTiming, Timing, evaluate_decode, first_difference
from dspark_lab.records import Sampling

TABLE = random_table(8, seed=3)
PROMPTS = [prompt([a, b], prompt_id=f"{a}-{b}", domain=f"domain {a}") for a in (1, 2, 3) for b in (1, 4)]
GREEDY = Sampling(max_new_tokens=12)


def run(*, target=None, drafter=None, prompts=PROMPTS, sampling=GREEDY, seed=0, **options):
    drafter = drafter or toy_drafters(TABLE)["noisy"]
    target = target or ToyTarget(TABLE)
    return evaluate_decode(target, drafter, prompts, sampling=sampling, num_draft_tokens=3, seed=seed, **options)


def test_every_prompt_has_its_trace():
    result = run()
    assert [(trace.prompt_id, trace.domain) for trace in result.traces] == [(p.id, p.domain) for p in PROMPTS]
    for trace in result.traces:
        assert trace.num_new_tokens == 1 + sum(step.num_accepted + 1 for step in trace.steps)
        assert all(step.num_draft_tokens == 3 and len(step.confidence) == 3 for step in trace.steps)


def test_greedy_text_agrees_in_fp32():
    result = run()
    assert result.mismatches == ()
    assert result.mismatch_rate == 0.0


class TiedVerifier(ToyVerifier):
    """Several tokens at once come out differently, as in low precision."""

    def forward(self, token_ids):
        output = super().forward(token_ids)
        if len(token_ids) == 4:
            output = replace(output, logits=output.logits.roll(1, -1))
        return output


def test_greedy_texts_that_differ_are_counted_with_their_place():
    target = ToyTarget(TABLE)
    target.verifier = lambda: TiedVerifier(TABLE)
    result = run(target=target, drafter=TableDrafter(TABLE))
    own = [
        plain_decode(ToyVerifier(TABLE), p.token_ids, sampling=GREEDY, eos_token_ids=(EOS,)).token_ids for p in PROMPTS
    ]
    differing = [p.id for p, text in zip(PROMPTS, own, strict=True) if len(text) > 1]
    assert [mismatch.prompt_id for mismatch in result.mismatches] == differing
    assert 0 < len(differing) <= len(PROMPTS)
    assert result.mismatch_rate == len(differing) / len(PROMPTS)
    # The prefill is right, the first verify step is not.
    assert set(result.mismatches) == {Mismatch(prompt_id, 1) for prompt_id in differing}


def test_sampled_texts_are_not_compared():
    result = run(sampling=Sampling(temperature=1.0, max_new_tokens=12))
    assert result.mismatches is None
    assert result.mismatch_rate is None


def test_a_prompts_random_numbers_do_not_depend_on_the_others():
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    traces = {trace.prompt_id: trace for trace in run(sampling=sampling).traces}
    backwards = run(sampling=sampling, prompts=PROMPTS[:0:-1]).traces
    assert len(backwards) == len(PROMPTS) - 1
    assert all(traces[trace.prompt_id] == trace for trace in backwards)
    assert run(sampling=sampling, seed=1).traces != tuple(traces.values())


def test_argmax_drafts_may_be_asked_for():
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    for trace in run(sampling=sampling, draft_greedily=True).traces:
        assert all(step.confidence == (1.0, 1.0, 1.0) for step in trace.steps)
    assert any(step.confidence != (1.0, 1.0, 1.0) for trace in run(sampling=sampling).traces for step in trace.steps)


def test_the_first_prompt_warms_up_and_the_ways_alternate(monkeypatch):
    calls = []

    def timed(function, conversation):
        calls.append((conversation.id, function.__name__))
        return function(conversation), 1.0 if function.__name__ == "speculative" else 2.0

    monkeypatch.setattr(decode, "_timed", timed)
    result = run(prompts=PROMPTS[:3])
    first, second, third = (p.id for p in PROMPTS[:3])
    assert calls == [
        (first, "speculative"),
        (first, "plain"),
        (second, "plain"),
        (second, "speculative"),
        (third, "speculative"),
        (third, "plain"),
    ]
    assert [timing.prompt_id for timing in result.timing.prompts] == [second, third]
    num_tokens = [trace.num_new_tokens for trace in result.traces[1:]]
    assert [timing.plain_tokens for timing in result.timing.prompts] == num_tokens
    assert result.timing.speculative_tokens_per_s == sum(num_tokens) / 2.0
    assert result.timing.median_speedup == result.timing.speedup == 2.0


def test_seconds_are_measured():
    timing = run().timing
    assert len(timing.prompts) == len(PROMPTS) - 1
    assert all(0 < t.speculative_s < 60 and 0 < t.plain_s < 60 for t in timing.prompts)


def test_speed_of_totals_and_median():
    timing = Timing(
        (PromptTiming("a", 1.0, 30, 1.0, 10), PromptTiming("b", 1.0, 20, 2.0, 20), PromptTiming("c", 8.0, 10, 1.0, 10))
    )
    assert timing.speculative_tokens_per_s == 6.0
    assert timing.plain_tokens_per_s == 10.0
    assert timing.speedup == 0.6
    assert timing.median_speedup == 2.0  # of 3, 2 and 1/8


def test_one_prompt_is_too_few_to_time():
    result = run(prompts=PROMPTS[:1])
    assert result.timing is None
    assert len(result.traces) == 1


def test_no_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompts: there is none"):
        run(prompts=[])


def test_progress_sees_every_prompt():
    seen = []

    def progress(items, description):
        seen.append(description)
        for item in items:
            seen.append(item.id)
            yield item

    run(progress=progress)
    assert seen == ["decode", *(p.id for p in PROMPTS)]


@pytest.mark.parametrize(
    ("left", "right", "position"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)]
)
def test_first_difference(left, right, position):
    assert first_difference(left, right) == position
    assert first_difference(right, left) == position


def test_the_toy_head_reads_the_toy_table():
    target = ToyTarget(TABLE)
    sample = target.sample([1, 2, 3, 4], prompt_length=2)
    torch.testing.assert_close(target.head().logits(sample.last_hidden_state[1]), TABLE[1, 2])
