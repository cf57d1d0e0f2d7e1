"""A hub on this machine that speaks as much of Hugging Face's protocol as uploads and downloads need."""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LoopbackHub(http.server.ThreadingHTTPServer):
    """Repositories in memory: the files of each commit by the name of the repository, and every request.

    A branch other than the main one is there under "owner/name@branch".
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """Serve a hub for the time of a block."""
    with LoopbackHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=[0.02])
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            if name.startswith("forbidden/"):
                return self.refuse(403, "Forbidden")
            self.server.repositories.setdefault(name, [{}])
            return self.answer({"url": f"{self.server.address}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", self.path):
            files = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            return self.answer({"files": modes})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self.path):
            name = match[1] if match[2] == "main" else f"{match[1]}@{match[2]}"
            values = [json.loads(line) for line in body.splitlines()]
            added = {
                each["value"]["path"]: base64.b64decode(each["value"]["content"])
                for each in values
                if each["key"] == "file"
            }
            commits = self.server.repositories[name]
            commits.append(commits[-1] | added)
            commit = self.number(name, len(commits) - 1)
            return self.answer({"commitUrl": f"{self.server.address}/{name}/commit/{commit}", "commitOid": commit})
        return self.refuse(404, "EntryNotFound")

    def do_GET(self):
        self.server.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        repository = "([^/]+/[^/]+)"
        match = re.fullmatch(
            f"/api/models/{repository}/(revision|tree)/([^/]+)|/{repository}/resolve/([^/]+)/(.+)", path
        )
        if not match:
            return self.refuse(404, "EntryNotFound")
        name, revision = match[1] or match[4], match[3] or match[5]
        repositories = self.server.repositories
        commits = {
            self.number(branch, place): files
            for branch in repositories
            if branch.partition("@")[0] == name
            for place, files in enumerate(repositories[branch])
        }
        if not commits:
            return self.refuse(401, "RepoNotFound")
        branch = name if revision == "main" else f"{name}@{revision}"
        number = self.number(branch, len(repositories[branch]) - 1) if branch in repositories else revision
        files = commits[number]
        if match[2] == "revision":
            return self.answer({"id": name, "sha": number})
        if match[2] == "tree":
            return self.answer(
                [
                    {"type": "file", "path": each, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for each, content in files.items()
                ]
            )
        if match[6] not in files:
            return self.refuse(404, "EntryNotFound")
        content = files[match[6]]
        self.send_response(200)
        self.send_header("X-Repo-Commit", number)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()

    def number(self, branch: str, place: int) -> str:
        """The hash of a commit."""
        return hashlib.sha1(f"{branch} {place}".encode()).hexdigest()

    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
