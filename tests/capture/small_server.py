"""A real HTTP server that speaks as little of vLLM's API as a pool of endpoints needs, and fails as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dspark_lab.nearby import LOOPBACK, free_port

Behaviour = Callable[[dict[str, Any]], dict[str, Any] | int | bytes]


class SmallServer:
    """``answer`` maps a request's body to the reply, a status, or bytes that are no JSON. ``start`` again after ``stop``."""

    def __init__(self, answer: Behaviour = lambda body: {"model": body["model"]}) -> None:
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.answer = answer
        self.healthy = True
        self.delay_s = 0.0
        self.served: list[dict[str, Any]] = []
        self.num_probes = 0
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> "SmallServer":
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    small.num_probes += 1
                    self.reply(200 if small.healthy else 503, b"")
                else:
                    self.reply(200, json.dumps({"data": [{"id": f"model of {small.port}"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with small.counted(body):
                    time.sleep(small.delay_s)
                    told = small.answer(body)
                if isinstance(told, int):
                    self.reply(told, b"as it was told")
                else:
                    self.reply(200, told if isinstance(told, bytes) else json.dumps(told).encode())

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer((LOOPBACK, self.port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # clients that have given up
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.served.append(body)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def small_servers(number: int) -> Iterator[list[SmallServer]]:
    servers = [SmallServer().start() for _ in range(number)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
