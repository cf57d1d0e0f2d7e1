"""Two small data sets, of which one can be downloaded, and what serves it."""

import http.server
import threading
from pathlib import Path

PLAIN_SET, FREE_SET = "tiny-text", "tiny-digits"


class Server:
    """Files served on the loopback interface; a name without a file is answered by 404."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut_short = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                outer.asked.append(name)
                if name not in outer.files:
                    self.send_error(404)
                    return
                data = outer.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if outer.cut_short else data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def put_plain(root: Path, *, names: tuple[str, ...] = ("train.txt", "test.txt")) -> Path:
    folder = root / PLAIN_SET
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes({"train.txt": b"a\nb\nc", "test.txt": b"d"}[name])
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
