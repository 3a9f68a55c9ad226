"""Several vLLM servers as one: a request goes to the least busy one that works, and on to the next when that one fails.

A server's circuit breaker is open until ``/health`` answers 200 and the server is admitted, closed while its requests
succeed, open again after ``FAILURES_TO_OPEN`` failures in a row or when nobody listens. A server that comes back gets one
request at a time until one succeeds; each failure of such a trial doubles the time to the next probe.
"""

import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark_lab.capture.endpoint import (
    Endpoint,
    EndpointError,
    NoServerError,
    NotAdmittedError,
    RefusedError,
    ServerFailure,
)
from dspark_lab.nearby import answers, get_json

log = logging.getLogger(__name__)

NUM_TRIES = 6
FAILURES_TO_OPEN = 3
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between tries of one request
LONGEST_COOL_OFF_S = 30.0
NUM_PROBERS = 8


class EndpointPool:
    """OpenAI-compatible servers of one target. Its methods may be called from any thread; ``with`` ends its own.

    Args:
        source: Their URLs, http://host:port; or a file with one a line (# begins a comment), read again while running: added
            servers are probed and used, removed ones get no further request.
        admit: Called with a server whose ``/health`` is well before it is used, each time it comes back; raises
            NotAdmittedError with the reason against it.
        check: Called every ``probe_every_s``; what it raises while a request waits for a server ends the wait.
        patience_s: How long a request waits for any server to be usable.
        probe_every_s: Between looks at the file and at servers that are not usable.

    Raises:
        ValueError: no URL, a URL that is none, or no such file.
    """

    def __init__(
        self,
        source: Sequence[str] | Path,
        *,
        patience_s: float,
        admit: Callable[[Endpoint], None] = lambda endpoint: None,
        check: Callable[[], None] = lambda: None,
        probe_every_s: float = 1.0,
    ) -> None:
        self.check = check
        self.source, self.admit, self.patience_s, self.probe_every_s = source, admit, patience_s, probe_every_s
        self._events: Counter[str] = Counter()
        self._endpoints = {url: Endpoint(url) for url in read_endpoints(source)}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._turns = 0
        self._list_trouble = ""  # what was last told of it
        self._probers = ThreadPoolExecutor(NUM_PROBERS, "probe")
        self._watcher = threading.Thread(target=self._watch, name="endpoints", daemon=True)
        self._watcher.start()

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """JSON in (the server's name of the model is added), JSON out. ``timeout_s`` is that of one try.

        Raises:
            RefusedError: a server found fault with the request.
            NoServerError: none was usable in time.
            EndpointError: ``NUM_TRIES`` failed.
        """
        failed: list[str] = []
        last: Endpoint | None = None
        for attempt in range(NUM_TRIES):
            endpoint = last = self._lease(last, patience_s=self.patience_s)
            try:
                reply = endpoint.post(path, body, timeout_s=timeout_s, headers=headers)
            except ServerFailure as error:
                self._return(endpoint, error)
                failed.append(str(error))
            except BaseException:
                self._return(endpoint)
                raise
            else:
                self._return(endpoint)
                return reply
            self._count("requests tried again")
            self._closed.wait(min(SHORTEST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1))
        raise EndpointError(f"{path} failed {NUM_TRIES} times: {'; '.join(failed[-2:])}")

    def wait(self, *, patience_s: float) -> None:
        """Until a server is usable. Raises NoServerError."""
        self._return(self._lease(None, patience_s=patience_s))

    @property
    def events(self) -> Mapping[str, int]:
        """What happened so far, by kind."""
        with self._changed:
            return dict(self._events)

    @property
    def usable(self) -> Sequence[str]:
        """URLs of the servers that requests may go to now."""
        with self._changed:
            return [endpoint.url for endpoint in self._endpoints.values() if endpoint.usable and not endpoint.draining]

    def close(self) -> None:
        """Requests that wait for a server fail; those under way go on. May be called twice."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._watcher.join()
        self._probers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lease(self, last: Endpoint | None, *, patience_s: float) -> Endpoint:
        """The least busy usable server, another one than ``last`` if there is one; waits for it."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            while True:
                found = [endpoint for endpoint in self._endpoints.values() if endpoint.accepts]
                found = [endpoint for endpoint in found if endpoint is not last] or found
                if found:
                    break
                listed = [endpoint for endpoint in self._endpoints.values() if not endpoint.draining]
                left = deadline - time.monotonic()
                hopeless = bool(listed) and all(endpoint.refusal for endpoint in listed)
                if left <= 0 or hopeless or self._closed.is_set():
                    told = "; ".join(map(str, listed)) or "none is listed"
                    waited = "closed" if self._closed.is_set() else f"none within {patience_s:g} s"
                    raise NoServerError(f"no usable server ({'none is admitted' if hopeless else waited}): {told}")
                self.check()
                self._changed.wait(min(left, self.probe_every_s))
            endpoint = min(found, key=lambda endpoint: (endpoint.under_way, endpoint.last_turn))
            self._turns += 1
            endpoint.last_turn = self._turns
            endpoint.under_way += 1
            return endpoint

    def _return(self, endpoint: Endpoint, failure: ServerFailure | None = None) -> None:
        """A request is over."""
        with self._changed:
            endpoint.under_way -= 1
            if failure is None or failure.busy:
                endpoint.failures, endpoint.trial, endpoint.cool_off_s = 0, False, 0.0
            else:
                endpoint.failures += 1
                if endpoint.usable and (failure.gone or endpoint.trial or endpoint.failures >= FAILURES_TO_OPEN):
                    self._open(endpoint, str(failure))
            self._forget_drained(endpoint)
            self._changed.notify_all()

    def _open(self, endpoint: Endpoint, trouble: str) -> None:
        endpoint.usable, endpoint.trouble = False, trouble
        endpoint.cool_off_s = min(2 * endpoint.cool_off_s or self.probe_every_s, LONGEST_COOL_OFF_S)
        endpoint.probe_at = time.monotonic() + endpoint.cool_off_s
        self._count("servers lost")
        log.warning("Lost the server %s; probing it from now on", endpoint)

    def _watch(self) -> None:
        while not self._closed.is_set():
            with suppress(Exception):  # told to whoever waits
                self.check()
            if isinstance(self.source, Path):
                self._follow_list()
            with self._changed:
                now = time.monotonic()
                due = [
                    endpoint
                    for endpoint in self._endpoints.values()
                    if not (endpoint.usable or endpoint.draining or endpoint.probing) and endpoint.probe_at <= now
                ]
                for endpoint in due:
                    endpoint.probing = True
            for endpoint in due:
                self._probers.submit(self._probe, endpoint)
            self._closed.wait(self.probe_every_s)

    def _probe(self, endpoint: Endpoint) -> None:
        trouble = refusal = ""
        try:
            if answers(f"{endpoint.url}/health"):
                endpoint.model = str(get_json(f"{endpoint.url}/v1/models")["data"][0]["id"])
                self.admit(endpoint)
            else:
                trouble = "does not answer /health"
        except (NotAdmittedError, RefusedError) as error:
            refusal = str(error)
        except Exception as error:  # a server may answer anything; whatever it is, it is not usable yet
            trouble = repr(error)
        with self._changed:
            endpoint.probing, endpoint.refusal = False, refusal
            endpoint.usable = not (trouble or refusal)
            if endpoint.usable:
                self._count("servers back" if endpoint.admitted else "servers admitted")
                endpoint.failures, endpoint.trial, endpoint.admitted = 0, endpoint.admitted, True
                log.info("Using the server %s", endpoint.url)
            else:
                if refusal:
                    log.warning("Not using the server %s", endpoint)
                    endpoint.cool_off_s = min(2 * endpoint.cool_off_s or self.probe_every_s, LONGEST_COOL_OFF_S)
                endpoint.trouble = trouble
                endpoint.probe_at = time.monotonic() + endpoint.cool_off_s
            self._changed.notify_all()

    def _follow_list(self) -> None:
        try:
            listed = read_endpoints(self.source)
        except ValueError as error:
            if str(error) != self._list_trouble:
                log.warning("%s The servers stay as they were.", error)
            self._list_trouble = str(error)
            return
        self._list_trouble = ""
        with self._changed:
            for url in listed:
                known = self._endpoints.get(url)
                if known is None:
                    self._endpoints[url] = Endpoint(url)
                    self._count("servers added")
                elif known.draining:
                    known.draining = False
                    self._count("servers added")
            for url, endpoint in list(self._endpoints.items()):
                if url not in listed and not endpoint.draining:
                    endpoint.draining = True
                    self._count("servers removed")
                    self._forget_drained(endpoint)
            self._changed.notify_all()

    def _forget_drained(self, endpoint: Endpoint) -> None:
        if endpoint.draining and not endpoint.under_way:
            self._endpoints.pop(endpoint.url, None)

    def _count(self, event: str) -> None:
        with self._changed:
            self._events[event] += 1


def read_endpoints(source: Sequence[str] | Path) -> list[str]:
    """URLs of servers, each once, without a path. ValueError: a URL that is none, no such file; no URL in a given list."""
    if isinstance(source, Path):
        try:
            lines = [line.partition("#")[0].strip() for line in source.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise ValueError(f"endpoints_file={source}: cannot be read ({error}).") from error
        given = [line for line in lines if line]
    else:
        given = list(source)
        if not given:
            raise ValueError("endpoints: empty; name at least one server, http://host:port.")
    wrong = [url for url in given if not re.fullmatch(r"https?://[^/\s]+(/v1)?/?", url)]
    if wrong:
        place = f"endpoints_file={source}" if isinstance(source, Path) else "endpoints"
        raise ValueError(f"{place}: {wrong[0]!r} is no http://host:port.")
    return list(dict.fromkeys(url.removesuffix("/").removesuffix("/v1") for url in given))
