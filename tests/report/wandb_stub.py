"""A stand-in for the GraphQL API of W&B: it takes what a report sends, and remembers it."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "UHJvamVjdDox", "internalId": "UHJvamVjdEludGVybmFsSWQ6MQ==", "name": "drafts", "entityName": "lab"}


RUNS = [
    {
        "id": "UnVuOjE=",
        "name": "demo-dspark-1234",
        "displayName": "demo-dspark",
        "projectId": "1",
        "state": "finished",
        "group": "first",
        "tags": [],
        "createdAt": "2026-01-01T00:00:00Z",
        "config": json.dumps(
            {"drafter_name": {"value": "dspark"}, "target_name": {"value": "tiny"}, "seed": {"value": 3}}
        ),
        "summaryMetrics": json.dumps({"acceptance_length/measured": 2.5, "_step": 40, "examples": {"_type": "html"}}),
        "systemMetrics": "{}",
        "user": {"name": "me", "username": "me"},
    }
]


@dataclass
class Stub:
    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def mutations(self) -> list[dict[str, Any]]:
        """Variables of every ``upsertView``."""
        return [variables for name, variables in self.requests if name == "upsertView"]


def answer(name: str, variables: dict[str, Any]) -> dict[str, Any]:
    if name == "upsertView":
        kept = {key: variables[key] for key in ("name", "description", "displayName", "type", "spec")}
        view = kept | {"id": variables["id"] or "Vmlldzox", "project": PROJECT, "createdAt": "2026-01-01T00:00:00"}
        view |= {
            "updatedAt": "2026-01-01T00:00:00",
            "user": {"name": "me", "photoUrl": "", "admin": False, "username": "me"},
        }
        return {"upsertView": {"view": view, "inserted": True}}
    if name == "ProjectInternalId":
        return {"project": PROJECT}
    if name == "GetProjects":
        node = PROJECT | {"createdAt": "2026-01-01T00:00:00", "isBenchmark": False, "user": None}
        return {
            "models": {"edges": [{"node": node, "cursor": "a"}], "pageInfo": {"endCursor": "a", "hasNextPage": False}}
        }
    if name == "Runs":
        edges = [
            {"node": node, "cursor": "a"} for node in RUNS if json.loads(variables["filters"]) == {"group": "first"}
        ]
        found = {"edges": edges, "pageInfo": {"endCursor": "a", "hasNextPage": False}}
        return {"project": PROJECT | {"runCount": len(edges), "readOnly": False, "runs": found}}
    user = {"id": "u", "username": "me", "entity": "lab", "flags": "{}", "teams": {"edges": []}, "admin": False}
    return {"viewer": user, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}


@contextmanager
def wandb_stub() -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
            name, variables = found[1] if found else "", body.get("variables") or {}
            stub.requests.append((name, variables))
            said = json.dumps({"data": answer(name, variables)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
