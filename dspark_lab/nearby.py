"""Servers on this machine or beside it: free ports, and HTTP that goes past any proxy."""

import http.client
import json
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

LOOPBACK = "127.0.0.1"

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the proxies of the environment, which do not know the servers that a run starts."""


def free_port(host: str = LOOPBACK) -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def answers(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether an HTTP GET of ``url`` gives status 200."""
    with suppress(OSError, http.client.HTTPException), DIRECT.open(url, timeout=timeout_s) as response:
        return response.status == 200
    return False


def get_json(url: str, *, timeout_s: float = 10.0) -> Any:
    """The JSON of an HTTP GET. OSError when nothing answers in time."""
    with DIRECT.open(url, timeout=timeout_s) as response:
        return json.load(response)


def post_json(url: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """JSON in, JSON out. OSError when nothing answers in time; of these, urllib's HTTPError when it refuses."""
    with DIRECT.open(_post(url, body, headers), timeout=timeout_s) as response:
        return json.load(response)


def stream_events(url: str, body: Mapping[str, Any], *, timeout_s: float) -> Iterator[bytes]:
    """JSON in; out comes the JSON of each server-sent event, when it comes. Errors as of ``post_json``."""
    with DIRECT.open(_post(url, body, None), timeout=timeout_s) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield line.removeprefix(b"data: ")


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> urllib.request.Request:
    told = {"Content-Type": "application/json", **(headers or {})}
    return urllib.request.Request(url, data=json.dumps(body).encode(), headers=told)
