"""A pool of endpoints against real HTTP servers that fail as they are told."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_server import SmallServer, small_servers

from dspark_lab.capture import endpoints
from dspark_lab.capture.endpoint import Endpoint, EndpointError, NotAdmittedError, RefusedError, ServerFailure
from dspark_lab.capture.endpoints import FAILURES_TO_OPEN, NUM_TRIES, EndpointPool, read_endpoints


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "SHORTEST_PAUSE_S", 0.005)


def pool_of(source: list[SmallServer] | Path, **settings: Any) -> EndpointPool:
    urls = source if isinstance(source, Path) else [server.url for server in source]
    return EndpointPool(urls, **{"patience_s": 10.0, "probe_every_s": 0.03, **settings})


def ask(pool: EndpointPool, **body: Any) -> Any:
    return pool.post("/v1/completions", body, timeout_s=5.0)


def eventually(happened: Callable[[], bool], *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_each_server_is_told_its_own_name_of_the_model() -> None:
    with small_servers(2) as servers, pool_of(servers) as pool:
        eventually(lambda: len(pool.usable) == 2)
        for _ in range(4):
            ask(pool, prompt=[1])
        for server in servers:
            assert server.served == 2 * [{"model": f"model of {server.port}", "prompt": [1]}]
        assert pool.events == {"servers admitted": 2}


def test_the_least_busy_server_gets_the_request() -> None:
    with small_servers(2) as (slow, quick), pool_of([slow, quick]) as pool, ThreadPoolExecutor(4) as threads:
        slow.delay_s, quick.delay_s = 1.0, 0.05
        eventually(lambda: len(pool.usable) == 2)
        list(threads.map(lambda n: ask(pool), range(24)))
        assert len(slow.served) + len(quick.served) == 24
        assert len(quick.served) > 2 * len(slow.served)
        assert slow.most_under_way <= 3  # while the quick one has work too


@pytest.mark.parametrize("fault", [500, 503, 408, b"no JSON"], ids=["500", "503", "408", "no JSON"])
def test_a_request_goes_on_to_another_server(fault: int | bytes) -> None:
    with small_servers(2) as (bad, good), pool_of([bad, good]) as pool:
        eventually(lambda: len(pool.usable) == 2)
        bad.answer = lambda body: fault
        for _ in range(10):
            assert ask(pool)["model"] == f"model of {good.port}"
        assert len(good.served) == 10 and len(bad.served) >= 1
        assert pool.events["requests tried again"] == len(bad.served)


def test_a_request_that_times_out_goes_on_to_another_server() -> None:
    with small_servers(2) as (bad, good), pool_of([bad, good]) as pool:
        eventually(lambda: len(pool.usable) == 2)
        bad.delay_s = 1.0
        for _ in range(3):
            assert pool.post("/v1/completions", {}, timeout_s=0.2)["model"] == f"model of {good.port}"


def test_what_a_server_refuses_is_not_asked_elsewhere() -> None:
    with small_servers(2) as servers, pool_of(servers) as pool:
        for server in servers:
            server.answer = lambda body: 400
        with pytest.raises(RefusedError, match=r"refused /v1/completions: HTTP Error 400.*as it was told"):
            ask(pool)
        assert sum(len(server.served) for server in servers) == 1
        eventually(lambda: len(pool.usable) == 2)  # the servers are well


def test_the_breaker_opens_and_only_probes_go_to_the_server() -> None:
    with small_servers(2) as (bad, good), pool_of([bad, good]) as pool:
        eventually(lambda: len(pool.usable) == 2)
        bad.answer = lambda body: 500
        bad.healthy = False
        for _ in range(20):
            ask(pool)
        assert len(bad.served) == FAILURES_TO_OPEN and pool.usable == [good.url]
        probes = bad.num_probes
        eventually(lambda: bad.num_probes > probes + 1)
        assert len(bad.served) == FAILURES_TO_OPEN


def test_a_busy_server_stays_in_use() -> None:
    with small_servers(1) as (server,), pool_of([server]) as pool:
        replies: list[Any] = [429, 429, 429, 429, {"fine": True}]
        server.answer = lambda body: replies.pop(0)
        assert ask(pool) == {"fine": True}
        assert pool.usable == [server.url] and "servers lost" not in pool.events


def test_a_server_that_comes_back_is_used_again_and_waited_for() -> None:
    with small_servers(1) as (server,), pool_of([server]) as pool, ThreadPoolExecutor(8) as threads:
        ask(pool)
        server.stop()
        waiting = [threads.submit(ask, pool) for _ in range(8)]
        eventually(lambda: pool.usable == [])
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        server.start()
        assert all(future.result(timeout=10)["model"] for future in waiting)
        assert pool.events["servers lost"] == pool.events["servers back"] == 1


def test_a_server_that_comes_back_is_tried_with_one_request() -> None:
    """Health tells little: eight requests must not be lost each time that it is well and its engine is not."""
    with small_servers(2) as (bad, good), pool_of([bad, good]) as pool, ThreadPoolExecutor(8) as threads:
        eventually(lambda: len(pool.usable) == 2)
        bad.answer = lambda body: 500
        eventually(lambda: bool(ask(pool)) and pool.events.get("servers lost", 0) == 1)
        bad.most_under_way, bad.delay_s, good.delay_s = 0, 0.05, 0.02
        list(threads.map(lambda n: ask(pool), range(200)))
        assert pool.events["servers back"] >= 1
        assert bad.most_under_way == 1
        # Each failed trial doubles the pause: two seconds of requests see but a few.
        assert len(bad.served) <= FAILURES_TO_OPEN + 8
        bad.answer = lambda body: {"fine": True}
        eventually(lambda: bool(threads.map(lambda n: ask(pool), range(8))) and bad.most_under_way > 1)


def test_no_server_within_the_patience() -> None:
    server = SmallServer()
    with (
        pool_of([server], patience_s=0.3) as pool,
        pytest.raises(
            EndpointError, match=r"no usable server \(none within 0\.3 s\): http://.*does not answer /health"
        ),
    ):
        ask(pool)


def test_what_makes_waiting_vain_ends_it() -> None:
    """A server that this process has started does not come back."""

    def check() -> None:
        raise ChildProcessError("it has ended")

    with small_servers(1) as (server,), pool_of([server], check=check, patience_s=60.0) as pool:
        eventually(lambda: len(pool.usable) == 1)
        ask(pool)  # as long as it works nobody hears of it
        server.stop()
        with pytest.raises(ChildProcessError, match="it has ended"):
            ask(pool)


def test_every_try_fails() -> None:
    with small_servers(1) as (server,), pool_of([server]) as pool:
        server.answer = lambda body: 500
        with pytest.raises(EndpointError, match=f"failed {NUM_TRIES} times: .*HTTP Error 500.*as it was told"):
            ask(pool)


def test_who_is_not_admitted_is_not_used() -> None:
    with small_servers(2) as (wrong, right):

        def admit(endpoint: Endpoint) -> None:
            if endpoint.url == wrong.url:
                raise NotAdmittedError(f"it serves {endpoint.model}")

        with pool_of([wrong, right], admit=admit) as pool:
            for _ in range(6):
                ask(pool)
            assert (len(wrong.served), len(right.served)) == (0, 6)
        with (
            pool_of([wrong], admit=admit, patience_s=60.0) as pool,
            pytest.raises(EndpointError, match=r"\(none is admitted\): .*: it serves model of"),
        ):
            ask(pool)  # at once: waiting would not help


def test_a_server_that_fails_while_it_is_examined_is_probed_again() -> None:
    """Only a verdict is a reason to give up."""
    told = iter([ServerFailure("gone again"), OSError("again"), None])

    def admit(endpoint: Endpoint) -> None:
        if (error := next(told)) is not None:
            raise error

    with small_servers(1) as (server,), pool_of([server], admit=admit) as pool:
        assert ask(pool) and pool.events == {"servers admitted": 1}


def test_a_server_that_comes_back_is_admitted_again() -> None:
    """It may have been restarted with other arguments."""
    admitted = []
    with small_servers(1) as (server,), pool_of([server], admit=lambda endpoint: admitted.append(endpoint)) as pool:
        ask(pool)
        server.stop()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, pool)
            eventually(lambda: pool.usable == [])
            server.start()
            waiting.result(timeout=10)
    assert len(admitted) == 2


def test_the_list_is_read_again_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = tmp_path / "endpoints"

    def relist(text: str) -> None:
        """At once: the pool may look between the emptying and the writing of a file."""
        written = listed.with_suffix(".new")
        written.write_text(text)
        written.replace(listed)

    with small_servers(2) as (first, second), ThreadPoolExecutor(4) as threads:
        relist(f"# ours\n{first.url}/v1  # the first\n")
        with pool_of(listed) as pool:
            ask(pool)
            first.delay_s = 0.4
            draining = [threads.submit(ask, pool) for _ in range(2)]
            eventually(lambda: first.under_way == 2)
            relist(f"{second.url}\n")
            eventually(lambda: pool.usable == [second.url])
            assert all(ask(pool)["model"] == f"model of {second.port}" for _ in range(4))
            # What the removed one had begun it finishes.
            assert [future.result()["model"] for future in draining] == 2 * [f"model of {first.port}"]
            assert len(first.served) == 3
            relist(f"{second.url}\nnonsense\n")
            time.sleep(0.15)
            assert pool.usable == [second.url]
            listed.unlink()
            time.sleep(0.15)
            told = [record.getMessage() for record in caplog.records if "stay as they were" in record.getMessage()]
            assert len(told) == 2 and "nonsense" in told[0] and "cannot be read" in told[1]  # each once
            assert ask(pool)["model"] == f"model of {second.port}"
            relist(f"{first.url}\n{second.url}\n")
            eventually(lambda: set(pool.usable) == {first.url, second.url})
            assert (pool.events["servers added"], pool.events["servers removed"]) == (2, 1)


def test_a_removed_server_that_is_listed_again_before_it_is_idle_goes_on(tmp_path: Path) -> None:
    listed = tmp_path / "endpoints"
    with small_servers(1) as (server,), ThreadPoolExecutor(1) as threads:
        listed.write_text(server.url)
        with pool_of(listed) as pool:
            ask(pool)
            server.delay_s = 0.5
            begun = threads.submit(ask, pool)
            eventually(lambda: server.under_way == 1)
            listed.write_text("")
            eventually(lambda: pool.usable == [])
            listed.write_text(server.url)
            eventually(lambda: pool.usable == [server.url])
            assert begun.result()


def test_closing_ends_the_wait() -> None:
    server = SmallServer()
    pool = pool_of([server], patience_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, pool)
        time.sleep(0.1)
        pool.close()
        pool.close()
        with pytest.raises(EndpointError, match="closed"):
            waiting.result(timeout=5)
    assert not any(thread.name.startswith(("endpoints", "probe")) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "endpoints: empty"),
        (["127.0.0.1:8000"], r"'127\.0\.0\.1:8000' is no http://host:port"),
        (["http://a/b"], "'http://a/b' is no"),
        (Path("/no/such/file"), "endpoints_file=/no/such/file: cannot be read"),
    ],
)
def test_what_is_no_list_of_servers(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EndpointPool(given, patience_s=1.0)


def test_a_server_is_listed_once() -> None:
    assert read_endpoints(["http://a:1/", "http://a:1/v1", "https://b"]) == ["http://a:1", "https://b"]
