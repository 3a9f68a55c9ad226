import pytest

from dspark_lab.data.corpus import Corpus
from dspark_lab.records import Conversation

ASKED = Conversation("p", ({"role": "user", "content": "hi"},))
CHAT = Conversation("c", (*ASKED.messages, {"role": "assistant", "content": "yes"}))


def corpus(**settings) -> Corpus:
    defaults = {
        "source": "stored",
        "train": [ASKED],
        "validation": [ASKED],
        "regenerate": True,
        "samplings": [{"temperature": 0.7}],
        "samples_per_prompt": 1,
        "max_new_tokens": 9,
        "truncated": "keep",
        "overlap": "report",
        "packaged_answers": None,
        "num_checked": 0,
        "enable_thinking": None,
        "reasoning_end": None,
        "draft_vocab_size": None,
        "min_supervised_tokens": 1,
        "row_tokens": 64,
        "rows_per_batch": 1,
        "num_workers": 0,
        "prefetch_factor": 1,
    }
    return Corpus(**defaults | settings)


def test_closing_assistant_turns_are_cut_off_where_the_target_answers_and_kept_where_not():
    assert [conversation.messages for conversation in corpus().read([CHAT, ASKED])] == [ASKED.messages] * 2
    assert corpus(regenerate=False).read([CHAT, ASKED]) == [CHAT, ASKED]


def test_the_length_limit_holds_for_every_sampling():
    made = corpus(samplings=[{"temperature": 0.7}, {"temperature": 0.0}], samples_per_prompt=2)
    assert {sampling.max_new_tokens for sampling in (*made.mix.samplings, made.greedy)} == {9}
    assert made.mix.samples_per_prompt == 2


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"samplings": []}, "samplings is empty but regenerate is true"),
        ({"regenerate": False, "packaged_answers": "x"}, "packaged_answers='x' has no effect"),
        ({"regenerate": False, "samples_per_prompt": 2}, "samples_per_prompt=2 has no effect"),
        ({"regenerate": False, "truncated": "drop"}, "truncated='drop' has no effect"),
        ({"truncated": "cut"}, "truncated"),
        ({"overlap": "keep"}, "overlap"),
        ({"reasoning_end": ""}, "reasoning_end='' ends nothing"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        corpus(**settings)
