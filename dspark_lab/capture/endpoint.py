"""One vLLM server as its clients see it, and what can go wrong with a request to it."""

import http.client
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_lab.nearby import post_json

BUSY = 429  # Too Many Requests: says nothing against the server
RETRIED = {408, 425, BUSY}  # of the 4xx; all 5xx are


class EndpointError(RuntimeError):
    """No server did what was asked for."""


class NoServerError(EndpointError):
    """No server is usable now; nothing is wrong with the request."""


class RefusedError(EndpointError):
    """A server says that the request itself is wrong: no other one is asked."""


class ServerFailure(EndpointError):
    """One server did not do what it should. ``busy``: it only asks for patience; ``gone``: nobody listens there."""

    def __init__(self, told: str, *, busy: bool = False, gone: bool = False) -> None:
        super().__init__(told)
        self.busy, self.gone = busy, gone


class NotAdmittedError(EndpointError):
    """Raised by an admission: the server runs, but is not the one that is wanted."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server. ``model`` is what it calls the one that it serves; empty before it was first probed."""

    url: str
    model: str = ""
    under_way: int = 0
    usable: bool = False
    admitted: bool = False  # at any time
    trial: bool = False
    draining: bool = False
    probing: bool = False
    refusal: str = ""  # why it was not admitted
    trouble: str = "not probed yet"  # why it is not usable
    failures: int = 0  # in a row
    cool_off_s: float = 0.0
    probe_at: float = 0.0
    last_turn: int = 0

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """JSON in (the server's name of the model is added), JSON out.

        Raises:
            RefusedError: the server found fault with the request.
            ServerFailure: everything else that can go wrong.
        """
        try:
            told = {"model": self.model, **body}
            return post_json(f"{self.url}{path}", told, timeout_s=timeout_s, headers=headers)
        except urllib.error.HTTPError as error:
            words = f"{error}: {error.read().decode(errors='replace')}"
            if error.code < 500 and error.code not in RETRIED:
                raise RefusedError(f"{self.url} refused {path}: {words}") from error
            raise ServerFailure(f"{self.url}: {words}", busy=error.code == BUSY) from error
        # An answer that breaks off, or is no JSON, is the server's failure too.
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailure(f"{self.url}: {error!r}", gone=_nobody_listens(error)) from error

    @property
    def accepts(self) -> bool:
        return self.usable and not self.draining and not (self.trial and self.under_way)

    def __str__(self) -> str:
        told = self.refusal or self.trouble
        return told if told.startswith(self.url) else f"{self.url}: {told}"


def _nobody_listens(error: BaseException) -> bool:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, ConnectionRefusedError)
