"""Stands in for a vLLM server where only starting and ending matter: its arguments told, /health and /version at --port.

Its engine dies of the first request that it is sent.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Timer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"version": "0"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        print("TimeoutError: RPC call to sample_tokens timed out.", flush=True)
        self.send_error(500, "EngineCore encountered an issue")
        Timer(0.3, os._exit, [1]).start()


if __name__ == "__main__":
    print(*sys.argv[1:], flush=True)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
