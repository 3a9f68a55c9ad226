import gzip
import json
import multiprocessing
import os
import signal
from dataclasses import asdict

import pytest

from dspark_lab.data.answers import AnswerBook, SamplingMix
from dspark_lab.records import Conversation, Sampling

GREEDY, WARM = Sampling(), Sampling(temperature=0.7)


def prompt(content: str, identifier: str = "p") -> Conversation:
    return Conversation(id=identifier, messages=({"role": "user", "content": content},), domain="math")


def answered(content: str, *ids: int, sampling: Sampling = GREEDY, identifier: str = "p") -> Conversation:
    return Conversation(
        id=identifier,
        messages=prompt(content).messages,
        domain="math",
        answer_token_ids=ids,
        sampling=sampling,
        finish="stop",
    )


def book(folder, fingerprint: str = "f00d", template_hash: str = "cafe") -> AnswerBook:
    return AnswerBook(folder, fingerprint=fingerprint, template_hash=template_hash)


def assigned(mix: SamplingMix, *positions: int) -> list[tuple[str, Sampling, int]]:
    prompts = [prompt(str(position), f"p{position}") for position in positions]
    return [(a.prompt.id, a.sampling, a.sample_index) for a in mix.assign(prompts, positions=positions)]


def test_a_prompts_sampling_depends_on_its_own_position_alone():
    mix = SamplingMix(samplings=[GREEDY, WARM])
    assert assigned(mix, 0, 1, 2) == [("p0", GREEDY, 0), ("p1", WARM, 0), ("p2", GREEDY, 0)]
    assert assigned(mix, 1, 2) == assigned(mix, 0, 1, 2)[1:]  # p0 was dropped
    assert SamplingMix(samplings=[asdict(WARM)]).samplings == (WARM,)


def test_several_samples_take_the_samplings_in_turn_and_have_ids_of_their_own():
    mix = SamplingMix(samplings=[GREEDY, WARM, WARM], samples_per_prompt=3)
    assert assigned(mix, 1) == [("p1", WARM, 0), ("p1/sample-1", WARM, 1), ("p1/sample-2", GREEDY, 0)]
    warm = SamplingMix(samplings=[WARM], samples_per_prompt=4)
    assert [index for _, _, index in assigned(warm, 7)] == [0, 1, 2, 3]


def test_mixes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="samplings: empty"):
        SamplingMix(samplings=[])
    with pytest.raises(ValueError, match="samples_per_prompt=0"):
        SamplingMix(samplings=[WARM], samples_per_prompt=0)
    for samplings, samples in (([GREEDY], 2), ([GREEDY, WARM], 3), ([GREEDY, GREEDY, WARM], 2)):
        with pytest.raises(ValueError, match=f"samples_per_prompt={samples}: .*the same greedy answer twice"):
            SamplingMix(samplings=samplings, samples_per_prompt=samples)


def test_an_answer_is_found_by_content_sampling_and_sample_index(tmp_path):
    answers = book(tmp_path)
    answers.add([answered("a", 1, 2), answered("a", 3, sampling=WARM)])
    answers.add([answered("a", 4, sampling=WARM)], sample_index=1)
    assert answers.get(prompt("a"), GREEDY) == answered("a", 1, 2)
    assert answers.get(prompt("a"), WARM) == answered("a", 3, sampling=WARM)
    assert answers.get(prompt("a"), WARM, sample_index=1) == answered("a", 4, sampling=WARM)
    assert answers.get(prompt("b"), GREEDY) is None
    assert answers.get(prompt("a"), Sampling(max_new_tokens=5)) is None
    assert len(answers) == 3


def test_the_asking_prompt_keeps_its_own_id_and_domain(tmp_path):
    answers = book(tmp_path)
    answers.add([answered("a", 1, identifier="first")])
    asking = Conversation(id="second", messages=prompt("a").messages, domain="chat")
    found = answers.get(asking, GREEDY)
    assert (found.id, found.domain, found.answer_token_ids) == ("second", "chat", (1,))


def test_a_second_book_goes_on_where_the_first_one_stopped(tmp_path):
    book(tmp_path).add([answered("Grüße 你好", 1)])
    again = book(tmp_path)
    assert again.get(prompt("Grüße 你好"), GREEDY).answer_token_ids == (1,)
    before = again.path.read_bytes()
    again.add([answered("Grüße 你好", 2)])  # the first answer stands
    assert again.path.read_bytes() == before
    again.add([answered("b", 3)])
    assert again.path.read_bytes().startswith(before) and len(book(tmp_path)) == 2


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_a_torn_last_line_is_cut_off_and_answered_again(tmp_path, kept):
    answers = book(tmp_path)
    answers.add([answered("a", 1)])
    complete = answers.path.read_bytes()
    answers.add([answered("b", 2)])
    torn = answers.path.read_bytes()[len(complete) :][:kept]
    answers.path.write_bytes(complete + torn)
    again = book(tmp_path)
    assert again.path.read_bytes() == complete
    assert again.get(prompt("a"), GREEDY) is not None and again.get(prompt("b"), GREEDY) is None
    again.add([answered("b", 2)])
    assert book(tmp_path).get(prompt("b"), GREEDY).answer_token_ids == (2,)


def test_a_torn_line_longer_than_the_reading_window_is_cut_off(tmp_path):
    answers = book(tmp_path)
    answers.add([answered("a", 1)])
    complete = answers.path.read_bytes()
    answers.path.write_bytes(complete + b"x" * 200_000)
    assert book(tmp_path).path.read_bytes() == complete


def test_a_torn_header_starts_the_file_anew(tmp_path):
    path = book(tmp_path).path
    path.write_bytes(path.read_bytes()[:10])
    answers = book(tmp_path)
    answers.add([answered("a", 1)])
    assert len(book(tmp_path)) == 1


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    answers = book(tmp_path)
    answers.add([answered("a", 1), answered("b", 2)])
    lines = answers.path.read_bytes().splitlines(keepends=True)
    answers.path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(ValueError, match=r"f00d-cafe\.jsonl, line 2: KeyError\('messages'\)"):
        book(tmp_path)
    answers.path.write_bytes(lines[1])
    with pytest.raises(ValueError, match=r"f00d-cafe\.jsonl, line 1: .*expected the header"):
        book(tmp_path)


def test_two_writers_do_not_lose_each_others_answers(tmp_path):
    """Each opens the book before the other writes, so neither knows the other's lines."""
    one, other = book(tmp_path), book(tmp_path)
    one.add([answered("a", 1)])
    other.add([answered("b", 2)])
    one.add([answered("c", 3)])
    assert one.get(prompt("c"), GREEDY).answer_token_ids == (3,)
    assert other.get(prompt("b"), GREEDY).answer_token_ids == (2,)
    assert len(book(tmp_path)) == 3


def _add_and_die(folder) -> None:
    book(folder).add([answered("a", 1)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_added_survives_a_kill(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_add_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert book(tmp_path).get(prompt("a"), GREEDY) == answered("a", 1)


def test_only_regenerated_conversations_are_taken(tmp_path):
    with pytest.raises(ValueError, match="conversation 'p' is not regenerated"):
        book(tmp_path).add([prompt("a")])


def test_packaged_answers_seed_the_book_of_the_same_target(tmp_path):
    source = book(tmp_path / "source")
    source.add([answered("b", 2, sampling=WARM, identifier="p1"), answered("a", 1, identifier="p0")])
    packaged = tmp_path / "answers.jsonl.gz"
    source.export(packaged, provenance={"command": "make answers"})
    header, *rows = (json.loads(line) for line in gzip.decompress(packaged.read_bytes()).splitlines())
    assert header == {"kind": "header", "fingerprint": "f00d", "template_hash": "cafe", "command": "make answers"}
    assert [row["id"] for row in rows] == ["p0", "p1"]
    assert rows[0].keys() == {"id", "messages", "domain", "answer_token_ids", "sampling", "finish"}

    target = book(tmp_path / "target")
    target.add([answered("a", 9)])
    assert (target.seed_from(packaged).num_copied, target.seed_from(packaged).num_copied) == (1, 0)
    assert target.get(prompt("b"), WARM).answer_token_ids == (2,)
    assert target.get(prompt("a"), GREEDY).answer_token_ids == (9,)  # its own answer stands
    assert len(book(tmp_path / "target")) == 2


def test_exporting_the_same_answers_gives_the_same_bytes(tmp_path):
    for name, order in (("one", (0, 1)), ("two", (1, 0))):
        answers = book(tmp_path / name)
        answers.add([(answered("a", 1), answered("b", 2, sampling=WARM))[index] for index in order])
        answers.export(tmp_path / f"{name}.gz", provenance={})
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


@pytest.mark.parametrize(
    ("fingerprint", "template_hash", "reason"),
    [("beef", "cafe", "fingerprint 'f00d', this target 'beef'"), ("f00d", "babe", "template_hash 'cafe', this target")],
)
def test_answers_of_another_target_are_refused_with_the_reason(tmp_path, fingerprint, template_hash, reason):
    source = book(tmp_path / "source")
    source.add([answered("a", 1)])
    source.export(tmp_path / "answers.jsonl.gz", provenance={})
    other = book(tmp_path / "other", fingerprint, template_hash)
    seeding = other.seed_from(tmp_path / "answers.jsonl.gz")
    assert seeding.num_copied == 0 and reason in seeding.refused
    assert len(other) == 0
