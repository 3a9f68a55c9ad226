from dspark_lab.data.prompts import disjoint
from dspark_lab.data.screening import screen_answers, screen_prompts
from dspark_lab.records import Conversation

QUESTION = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
END = 0
TEXTS = {END: "", 1: "short", 2: QUESTION}


def asked(identifier: str, content: str, *answer: int, finish: str = "stop") -> Conversation:
    message = {"role": "user", "content": content}
    return Conversation(identifier, (message,), answer_token_ids=answer or None, finish=finish if answer else None)


def given(identifier: str, answer: str, **fields) -> Conversation:
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": answer, **fields})
    return Conversation(identifier, messages)


def screened(*conversations: Conversation, truncated="keep", overlap="report"):
    return screen_answers(
        conversations,
        evaluation=[asked("e", QUESTION)],
        truncated=truncated,
        overlap=overlap,
        end_token_ids={END},
        decode=lambda ids: " ".join(TEXTS[token] for token in ids),
    )


def ids(conversations) -> list[str]:
    return [conversation.id for conversation in conversations]


def test_overlapping_prompts_are_counted_and_dropped_only_if_asked():
    splits = disjoint(
        train=[asked("t0", "hello"), asked("t1", f"Well: {QUESTION}?"), asked("t2", "bye")],
        evaluation=[asked("e", QUESTION)],
    )
    reported, count = screen_prompts(splits, overlap="report")
    assert reported == splits and (count.num_overlapping, count.num_compared) == (1, 3) and count.share == 1 / 3
    dropped, count = screen_prompts(splits, overlap="drop")
    assert ids(dropped.train) == ["t0", "t2"] and dropped.train_positions == (0, 2)
    assert dropped.dropped == {"train_prompt_overlaps_evaluation": 1} and count.num_overlapping == 1


def test_empty_answers_go_truncated_ones_as_asked():
    conversations = (
        asked("fine", "a", 1, END),
        asked("empty", "b", END),
        asked("cut", "c", 1, 1, finish="length"),
    )
    kept = screened(*conversations)
    assert ids(kept.kept) == ["fine", "cut"] and kept.dropped == {"answer_empty": 1}
    strict = screened(*conversations, truncated="drop")
    assert ids(strict.kept) == ["fine"] and strict.dropped == {"answer_empty": 1, "answer_truncated": 1}


def test_answers_that_repeat_an_evaluation_prompt_are_counted_and_dropped_if_asked():
    conversations = (asked("copy", "a", 2, END), asked("fine", "b", 1, END), given("said", QUESTION))
    reported = screened(*conversations)
    assert ids(reported.kept) == ["copy", "fine", "said"] and reported.dropped == {}
    assert (reported.overlap.num_overlapping, reported.overlap.num_compared) == (2, 3)
    strict = screened(*conversations, overlap="drop")
    assert ids(strict.kept) == ["fine"] and strict.dropped == {"answer_overlaps_evaluation": 2}


def test_a_given_answer_is_empty_without_text_call_or_thought():
    conversations = (
        given("blank", " \n"),
        given("call", "", tool_calls=[{"id": "1"}]),
        given("thought", "", reasoning_content="hmm"),
        asked("prompt", "no answer at all"),
    )
    assert ids(screened(*conversations).kept) == ["call", "thought", "prompt"]


def test_nothing_compared_has_no_share():
    assert screened().overlap.share == 0.0
