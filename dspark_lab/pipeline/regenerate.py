"""Stage *regenerate*: the target answers the prompts."""

import time
from collections.abc import Sequence

from dspark_lab.data.answers import Assignment
from dspark_lab.data.overlap import NUM_WORDS
from dspark_lab.pipeline.conversations import packaged
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.records import Conversation, Metric, Sampling
from dspark_lab.report.vocabulary import metric


def regenerate(parts: Parts) -> Outcome:
    """The target answers every prompt that has no recorded answer yet."""
    asked = parts.conversations
    assigned = [pair for split in asked.assigned.values() for pair in split]
    events: dict[str, int] = {}
    if parts.corpus.regenerate and parts.corpus.packaged_answers:
        seeding = asked.book.seed_from(packaged(parts.corpus.packaged_answers))
        if seeding.refused:
            console.print(f"shipped answers are not used: {seeding.refused}")
        elif seeding.num_copied:
            events["taken from the shipped answers"] = seeding.num_copied
        if seeding.num_copied and parts.corpus.num_checked:
            events |= _check_packaged(parts)
    missing = [assignment for assignment in assigned if asked.answer(assignment) is None]
    known = len(assigned) - len(missing)
    if known:
        console.print(f"regenerate: {known} of {len(assigned)} answers are there already")
    metrics = _answer(parts, missing) + _overlap(parts)
    parts.cluster.stop_engine()  # what comes next needs its memory
    conversations = [c for split in asked.kept.values() for c in split]
    lengths = sum(c.finish == "length" for c in conversations)
    if lengths:
        events["stopped by max_new_tokens"] = lengths
    events["regenerated"] = len(missing)
    events |= parts.target.take_events()
    dropped = {**asked.splits.dropped, **asked.screened.dropped}
    num_in = len(assigned) + sum(asked.splits.dropped.values())
    return {"num_in": num_in, "num_out": len(conversations), "dropped": dropped, "events": events}, metrics


def _answer(parts: Parts, missing: Sequence[Assignment]) -> list[Metric]:
    time_s, num_tokens = 0.0, 0
    rounds: dict[tuple[Sampling, int], list[Conversation]] = {}
    for assignment in missing:
        assert assignment.sampling is not None
        rounds.setdefault((assignment.sampling, assignment.sample_index), []).append(assignment.prompt)
    for (sampling, sample_index), prompts in rounds.items():
        how = "greedy" if sampling.greedy else f"T={sampling.temperature:g}"
        how += f", sample {sample_index + 1}" if sample_index else ""
        answers = parts.target.regenerate(prompts, sampling=sampling)  # the engine is ready now
        started = time.monotonic()
        for answer in track(answers, f"regenerate ({how})", total=len(prompts)):
            parts.conversations.book.add([answer], sample_index=sample_index)
            num_tokens += len(answer.answer_token_ids or ())
        time_s += time.monotonic() - started
    if not num_tokens:
        return []
    return [metric("regenerate_tokens_per_s", num_tokens / time_s, origin="measured")]


def _overlap(parts: Parts) -> list[Metric]:
    """How much of the training text stands in the benchmark's prompts."""
    setting = {"benchmark": parts.benchmark.name, "num_words": NUM_WORDS}
    asked = parts.conversations
    found = {"train_prompt_overlap": asked.prompt_overlap, "train_answer_overlap": asked.screened.overlap}
    for name, count in found.items():
        kind = name.split("_")[1]
        console.print(
            f"overlap: {count.num_overlapping} of {count.num_compared} training {kind}s ({count.share:.1%}) share "
            f"{NUM_WORDS} words in a row with a prompt of {parts.benchmark.name}"
        )
    return [
        metric(name, count.share, origin="measured", setting=setting, num_samples=count.num_compared)
        for name, count in found.items()
    ]


def _check_packaged(parts: Parts) -> dict[str, int]:
    """Write some shipped greedy answers again; on other hardware a near tie may fall the other way."""
    greedy, asked = parts.corpus.greedy, parts.conversations
    prompts = [entry.prompt for split in asked.assigned.values() for entry in split if entry.sampling == greedy]
    found = [answer for prompt in prompts if (answer := asked.book.get(prompt, greedy)) is not None]
    shipped = {answer.id: answer.answer_token_ids for answer in found[: parts.corpus.num_checked]}
    chosen = [prompt for prompt in prompts if prompt.id in shipped]
    answers = parts.target.regenerate(chosen, sampling=greedy)
    again = list(track(answers, "check of shipped answers", total=len(chosen)))
    same = sum(shipped[answer.id] == answer.answer_token_ids for answer in again)
    console.print(f"check: {same} of {len(again)} shipped answers were written again token for token")
    return {"checked against shipped": len(again), "differing from shipped": len(again) - same}
