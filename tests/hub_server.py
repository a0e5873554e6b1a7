"""A stand-in of the Hugging Face hub: an HTTP server on this machine, with what an upload needs."""

import base64
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_a_test"


class Hub:
    """What was asked, what is there, and what the server refuses."""

    def __init__(self):
        self.repositories = {}  # {"private": ...} by name
        self.files = {}  # contents by path
        self.role = "write"
        self.fails_at = ""

    def answer(self, method, path, body):
        """Status and JSON."""
        if self.fails_at and self.fails_at in path:
            return 403, {"error": "the storage of someone is full"}
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "orgs": [{"name": "our-lab"}], "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/repos/create":
            name = "/".join(filter(None, (body.get("organization") or "someone", body["name"])))
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}
            self.repositories[name] = {"private": body.get("visibility") == "private"}
            return 200, {"url": f"{self.address}/{name}", "id": name}
        if path == "/api/validate-yaml":  # of the model card
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return 200, {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body["files"]
                ]
            }
        if "/commit/" in path:
            for line in body:
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            name = path.split("/models/")[1].split("/commit/")[0]
            return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1", "success": True}
        if "/revision/" in path or path.startswith("/api/models/"):
            return 200, {"id": path.split("/models/")[1].split("/revision/")[0], "sha": "1", "siblings": []}
        return 404, {"error": f"{method} {path}"}


@contextlib.contextmanager
def running():
    """Yield a hub that answers at `hub.address`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            if "ndjson" in (self.headers.get("content-type") or ""):
                body = [json.loads(line) for line in content.splitlines()]
            else:
                body = json.loads(content or "{}")
            known = self.headers.get("authorization") == f"Bearer {TOKEN}"
            status, answer = (
                hub.answer(self.command, self.path.split("?")[0], body) if known else (401, {"error": "who?"})
            )
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = _do

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub, monkeypatch):
    """Let `huggingface_hub` in this process ask the hub, with a token that the hub knows."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
