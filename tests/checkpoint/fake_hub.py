# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on this machine that serves one directory as one repository."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote

from tests.checkpoint.samples import COMMIT
from tests.loopback import Handler, listening


class FakeHub:
    """Serves one directory as one repository."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.repository = repository
        self.directory = directory
        self.sent: dict[str, int] = {}
        """Bytes by file."""
        self.endpoint = ""

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.directory)) for file in self.directory.rglob("*") if file.is_file())


@contextmanager
def fake_hub(repository: str, directory: Path) -> Iterator[FakeHub]:
    hub = FakeHub(repository, directory)
    with listening(_handler(hub)) as hub.endpoint:
        yield hub


def _handler(hub: FakeHub) -> type[Handler]:
    class Hub(Handler):
        protocol_version = "HTTP/1.1"

        def head(self) -> None:
            self.answer_file(has_body=False)

        def get(self) -> None:
            path = unquote(self.path).partition("?")[0]
            if re.fullmatch(rf"/api/models/{hub.repository}(/revision/\w+)?", path):
                files = [{"rfilename": name} for name in hub.files()]
                self.answer_json({"id": hub.repository, "sha": COMMIT, "siblings": files})
            elif path.startswith(f"/api/models/{hub.repository}/tree/"):
                self.answer_json([self.entry(name) for name in hub.files()])
            else:
                self.answer_file(has_body=True)

        def post(self) -> None:
            fields = parse_qs(self.body().decode())
            known = set(hub.files())
            self.answer_json([self.entry(name) for name in fields["paths"] if name in known])

        def entry(self, name: str) -> dict[str, object]:
            content = (hub.directory / name).read_bytes()
            return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

        def answer_json(self, document: object) -> None:
            self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def answer_file(self, *, has_body: bool) -> None:
            match = re.fullmatch(rf"/{hub.repository}/resolve/\w+/(.+)", unquote(self.path))
            file = hub.directory / match[1] if match else hub.directory / "nothing"
            if not file.is_file():
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"})
                return
            content = file.read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            status, body = 200, content
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
                status, body = 206, content[begin : end + 1]
                headers["Content-Range"] = f"bytes {begin}-{begin + len(body) - 1}/{len(content)}"
            if has_body:
                name = str(file.relative_to(hub.directory))
                hub.sent[name] = hub.sent.get(name, 0) + len(body)
            self.answer(status, body, headers, has_body=has_body)

    return Hub
