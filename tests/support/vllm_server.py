# SPDX-License-Identifier: Apache-2.0
"""A server that answers `omni-core plan --server` as vLLM does."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def vllm_server(metrics, rpc=404):
    """Serves at the address it gives.

    Args:
        metrics: the text of `/metrics`.
        rpc: the answers of the workers in development mode, or the HTTP status that stands in for them.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200 if self.path == "/metrics" else 404, metrics)

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, asked) == ("/collective_rpc", {"method": "omni_core_report"})
            if isinstance(rpc, int):
                self.answer(rpc, "no")
            else:
                self.answer(200, json.dumps({"results": rpc}))

        def answer(self, status, text):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            return None

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()
            thread.join()
