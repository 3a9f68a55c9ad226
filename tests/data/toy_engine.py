"""An engine in this process whose states follow from the token ids; it delivers at random moments, and injects faults."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dspark_lab.capture.protocol import CaptureError, Described, EngineUnreachableError, SampleSource, payload_bytes
from dspark_lab.data.live import LiveData, LiveRecipe
from dspark_lab.data.window import Window
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.protocol import HiddenStateStore, Manifest
from dspark_lab.store.sample import require_finite

MANIFEST = Manifest(
    "toy",
    revision="0",
    fingerprint="f",
    template_hash="t",
    layer_ids=(1, 2),
    hidden_size=4,
    engine="test",
    dtype="float32",
)


def sample_of(conversation: TokenizedConversation) -> TargetSample:
    states = conversation.token_ids[:, None].float().expand(-1, 4)
    return TargetSample(conversation.token_ids, conversation.loss_mask, states[:, None].repeat(1, 2, 1), states.clone())


class ToyEngine(SampleSource):
    """``faults``: what goes wrong with the next requests for a key, in order; ``always`` with every request of it."""

    def __init__(
        self,
        *,
        seed: int = 0,
        slow_s: float = 0.002,
        manifest: Manifest = MANIFEST,
        states: Callable[[TokenizedConversation], TargetSample] = sample_of,
        payload_timeout_s: float = 5.0,
    ) -> None:
        self.concurrency, self.payload_timeout_s = 4, payload_timeout_s
        self.manifest, self.slow_s, self.states = manifest, slow_s, states
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always: dict[str, str] = {}
        self.gone = False
        self.asked: list[str] = []
        self.payloads: dict[str, tuple[TokenizedConversation, str | None]] = {}
        self.strays: dict[str, float] = {}
        self.most = Window(0, 0)  # that lay here at once
        self._random, self._lock = random.Random(seed), threading.Lock()

    def submit(self, conversation: TokenizedConversation) -> Described:
        with self._lock:
            delay = self._random.uniform(0, self.slow_s)
        time.sleep(delay)
        if self.gone:
            raise EngineUnreachableError("connection refused")
        with self._lock:
            key = conversation.key
            self.asked.append(key)
            fault = self.faults[key].pop(0) if self.faults[key] else self.always.get(key)
            if fault == "refused":
                raise CaptureError("HTTP Error 400", reason="engine")
            handle = f"{key}-{len(self.asked)}"
            self.payloads[handle] = conversation, fault
            sizes = [payload_bytes(len(held), self.manifest) for held, _ in self.payloads.values()]
            self.most = Window(max(self.most.num_samples, len(sizes)), max(self.most.num_bytes, sum(sizes)))
            return {"handle": handle, "at": time.monotonic() + self._random.uniform(0, self.slow_s)}

    def ready(self, described: Described) -> bool:
        if described["handle"] not in self.payloads:
            return False
        fault = self.payloads[described["handle"]][1]
        if fault == "failed":
            raise CaptureError("connector failed", reason="producer")
        return fault != "nothing" and time.monotonic() >= described["at"]

    def get(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        held, fault = self.payloads[described["handle"]]
        if fault == "other ids":
            raise CaptureError("other token ids", reason="token_ids")
        sample = self.states(held)
        if fault == "nan":
            sample = replace(sample, last_hidden_state=torch.full_like(sample.last_hidden_state, float("nan")))
        require_finite(held.key, sample)
        return sample

    def remove(self, described: Sequence[Described]) -> None:
        with self._lock:
            for one in described:
                self.payloads.pop(one["handle"], None)

    def remove_strays(self) -> int:
        return 0


def live(
    engine: SampleSource,
    conversations: Sequence[TokenizedConversation],
    *,
    window: Window = Window(40, 10**6),  # noqa: B008
    kept: Callable[[], HiddenStateStore] | None = None,
    **recipe: Any,
) -> LiveData:
    settings: Mapping[str, Any] = {
        "window_samples": window.num_samples,
        "window_bytes": window.num_bytes,
        "num_retries": 2,
        "engine_deadline_s": 60.0,
        "max_lost_share": 1.0,
        "max_lost_in_a_row": 1000,
    }
    by_key = {conversation.key: conversation for conversation in conversations}
    return LiveData(engine, by_key, LiveRecipe(**{**settings, **recipe}), window, kept)
