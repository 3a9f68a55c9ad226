"""Stage *capture*: the target's states of every conversation go into the store; with live data, not the training ones."""

import time
from dataclasses import asdict

from dspark_lab.data.mixture import source_cards
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.report.vocabulary import metric


def capture(parts: Parts) -> Outcome:
    """The target's states of every conversation that the store does not hold yet."""
    live, conversations = parts.corpus.source == "live", parts.conversations
    splits = {split: samples for split, samples in conversations.tokenized.items() if split != "train" or not live}
    store, wanted = parts.store, {c.key: c for samples in splits.values() for c in samples}
    given = sum(len(samples) for samples in conversations.tokenized.values())
    left = given - sum(len(samples) for samples in splits.values())
    num_split = given + len(conversations.unmaskable) - sum(map(len, conversations.kept.values()))
    there = set(store.keys())
    missing = [conversation for key, conversation in wanted.items() if key not in there]
    num_tokens = sum(len(conversation) for conversation in missing)
    size = store.estimate_bytes(num_tokens, num_samples=len(missing))
    console.print(
        f"capture: {len(wanted) - len(missing)} of {len(wanted)} conversations are there already; "
        f"{num_tokens} tokens, {size / 2**20:.0f} MiB to come"
    )
    store.ensure_room(size)
    time_s = 0.0
    if missing:  # else the target's weights need not be loaded at all
        samples = (parts.source if live else parts.target).capture(missing)  # the engine is ready now
        started = time.monotonic()
        for key, sample in track(samples, "capture", total=len(missing)):
            store.put(key, sample)
        store.sync()
        time_s = time.monotonic() - started
    if not live:
        parts.cluster.stop_engine()  # what comes next needs its memory
    supervised = sum(int(conversation.loss_mask.sum()) for conversation in wanted.values())
    metrics = [
        metric("num_conversations", len(wanted), origin="measured"),
        metric("num_supervised_tokens", supervised, origin="measured"),
        metric("stored_bytes", store.estimate_bytes(sum(map(len, wanted.values())), num_samples=len(wanted)),
               origin="measured"),
    ]  # fmt: skip
    if missing:
        metrics.append(metric("capture_tokens_per_s", num_tokens / time_s, origin="measured"))
    dropped = {
        "same content as another conversation": given - left - len(wanted),
        "cannot be masked with this template": len(conversations.unmaskable),
    }
    events = {"captured": len(missing), "already in the store": len(wanted) - len(missing)}
    events |= parts.target.take_events()
    if live:
        events["left to live capture"] = left
    if num_split:
        events["further samples of conversations split by turn"] = num_split
    cards = source_cards(parts.corpus.train, conversations.splits.train, conversations.tokenized["train"])
    for card in cards:
        console.print(f"source {card.name}: {card.num_prompts} prompts, {card.num_tokens} tokens")
    return {
        "num_in": given + len(conversations.unmaskable),
        "num_out": len(wanted) + left,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "events": events,
        "sources": [asdict(card) for card in cards],
    }, metrics
