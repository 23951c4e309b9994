"""A server with one fault or none, for tests of `kvring smoke`: `broken_server.py FAULT ... --port PORT`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LINES = """device profile cpu: 0 routed keys (built in)
[ring] content scoring ON by default (the ring is configured)
engine ready | stub | total 0.1s | weights 0.0 GiB
capacity | KV 17,920 tokens, bf16, explicit | pages 280/4,096 | runtime 0.1 GiB | free 9.0 GiB
[ring] budgets: sink=4, selection=32, recent=200, free=44 (pool 280) [sum == pool: yes]
reuse host-backed: on
listening on http://127.0.0.1:0 | model stub | auth disabled"""

fault = sys.argv[1] if len(sys.argv) > 1 else "none"
seen: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        status = {"late": "loading", "can't load": "failed"}.get(fault, "ready")
        self.answer({"status": status, "data": [{"id": "stub"}]})

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/tokenize":
            return self.answer({"count": len(json.loads(text)["prompt"].split())})
        if fault == "cut":  # at the pool's edge, and called the asked length
            usage = {"prompt_tokens": 4000, "completion_tokens": 20}
            choice = {"text": "so", "finish_reason": "stop"}
            recall = {"hidden_pages": 9, "pages_selected": 9}
            return self.answer({"choices": [choice], "usage": usage, "timings": {}, "kvring": {"recall": recall}})
        messages = json.loads(text)["messages"]
        prompt = json.dumps(messages)
        key = re.findall(r"access code for ([a-z]+ [a-z]+)", messages[-1]["content"])[-1]
        value = re.search(key + r"[^.]*?([0-9]{5})", prompt, re.I).group(1)
        known = any(past[:2000] == prompt[:2000] for past in seen)
        cached = 960 if known != (fault == "amnesia") else 0
        if fault == "blind" and seen:
            cached = 960
        seen.append(prompt)
        said = {"wrong": "99999", "empty": "", "parrot": "so it is, " * 9}.get(fault, value)
        if fault == "busy":
            return self.answer({"error": {"message": "too many"}}, 429)
        self.answer(
            {
                "choices": [{"message": {"content": said}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": cached}},
            }
        )

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    port = int(sys.argv[len(sys.argv) - sys.argv[::-1].index("--port")])  # the last one counts
    if fault == "refuses":
        sys.exit("error: the context doesn't fit\nfix: --max-context 1")
    if fault == "crashes":
        raise RuntimeError("boom")
    if fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "parent":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    for line in LINES.splitlines()[: 3 if fault == "quiet" else None]:
        print(line, flush=True)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if fault == "can't load":
        threading.Timer(1.0, server.shutdown).start()
    server.serve_forever()
    sys.exit("error: the model is damaged")


if __name__ == "__main__":
    main()
