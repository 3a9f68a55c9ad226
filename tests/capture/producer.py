"""A capturing server in a process of its own: vLLM's API and the payloads of hs-connectors' own writer, without a model.

``python producer.py <port> <mooncake_master>``. POST /faults takes a list of what goes wrong with the next requests, one
each: "refused", "garbage", "other ids", "nan", "short", "flipped", "failed", "nothing", or null.
"""

import json
import sys
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from hs_connectors.mooncake_store import (  # pyright: ignore[reportMissingImports]
    MooncakeHiddenStatesStore,
    MooncakeStoreConfig,
    packed_layout,
)
from produced import states_of

from dspark_lab.capture import checksum


class Producer(BaseHTTPRequestHandler):
    store: MooncakeHiddenStatesStore
    faults: list[str | None]

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/faults":
            self.faults += body
            return self.reply({})
        fault = self.faults.pop(0) if self.faults else None
        if fault == "refused":
            return self.reply({"error": "refused"}, status=400)
        if fault == "garbage":
            return self.reply({"kv_transfer_params": {"handle": 3, "version": 1, "tensors": []}})
        handle = f"cmpl-{self.headers['X-Request-Id']}-0-{uuid.uuid4().hex[:8]}"
        self.reply({"kv_transfer_params": self.produce(handle, torch.tensor(body["prompt"]), fault)})

    def produce(self, handle: str, token_ids: torch.Tensor, fault: str | None) -> dict[str, Any]:
        states = states_of(token_ids)
        tensors = {"hidden_states": states, "token_ids": token_ids}
        layout, num_bytes = packed_layout({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
        described = {"handle": handle, "version": 1, "tensors": layout, "metadata": {"total_aligned_bytes": num_bytes}}
        if fault == "failed":
            self.store.put_error(described, "out of memory")
        elif fault == "short":
            written = {**described, "metadata": {"total_aligned_bytes": num_bytes - 64}}
            self.store.put_sample(written, tensors)
        elif fault == "flipped":  # a bit, of what our connector would have sealed
            checksum.leave_room(described)
            self.store.put_sample(described, tensors)
            mooncake: Any = self.store._store
            payload = bytearray(mooncake.get(handle))
            checksum.seal(memoryview(payload))
            payload[4] ^= 1
            mooncake.remove(handle, True)
            mooncake.put(handle, bytes(payload))
        elif fault != "nothing":
            if fault == "nan":
                states[-1, -1, 0] = float("nan")
            if fault == "other ids":
                tensors["token_ids"] = token_ids.flip(0) + 1
            self.store.put_sample(described, tensors)
        return described

    def reply(self, content: Any, *, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    Producer.store = MooncakeHiddenStatesStore(
        MooncakeStoreConfig(
            local_hostname="127.0.0.1",
            master_server_address=sys.argv[2],
            global_segment_size=0,
            local_buffer_size=2**24,
        )
    ).setup()
    Producer.faults = []
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Producer).serve_forever()
