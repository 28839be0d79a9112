#!/usr/bin/env bash
# huggingface_hub 2.4.0: a snapshot that was fetched with patterns cannot be opened offline without them.
#
# Online, snapshot_download keeps the list of the repository's files beside the snapshot. Offline, it compares the
# snapshot with that list and raises IncompleteSnapshotError for each file that was left out on purpose: weights in
# other formats, a README. The same patterns must be repeated at every offline call, by every program that reads the
# cache. Images that fetch "*.json" and "*.safetensors" and then run with HF_HUB_OFFLINE=1 stop at the start.
#
# Expected: offline, the folder of the cached commit.
# Runs against a small hub on 127.0.0.1.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0

cat > "$directory/offline.py" <<'PYTHON'
import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = {"README.md": b"a model", "config.json": b"{}", "model.gguf": b"GGUF", "tokenizer.json": b"{}"}
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """One repository, o/m, of one commit."""

    protocol_version = "HTTP/1.1"

    def send(self, body, headers=(), status=200):
        self.send_response(status)
        for name, value in [*headers, ("content-length", str(len(body)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        ids = {file: hashlib.sha1(body).hexdigest() for file, body in FILES.items()}
        as_json = [("content-type", "application/json")]
        if path.startswith("/api/models/o/m/tree/"):
            tree = [{"type": "file", "path": file, "size": len(FILES[file]), "oid": ids[file]} for file in FILES]
            self.send(json.dumps(tree).encode(), as_json)
        elif path.startswith("/api/models/o/m"):
            info = {"id": "o/m", "sha": COMMIT, "siblings": [{"rfilename": file} for file in FILES]}
            self.send(json.dumps(info).encode(), as_json)
        elif "/resolve/" in path and name in FILES:
            self.send(FILES[name], [("x-repo-commit", COMMIT), ("etag", f'"{ids[name]}"')])
        else:
            self.send(b"{}", as_json, 404)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
os.environ |= {
    "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
    "HF_HOME": sys.argv[1],
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

from huggingface_hub import snapshot_download  # noqa: E402 - it reads the variables

folder = snapshot_download("o/m", allow_patterns=["*.json"])
print("fetched with *.json:", *sorted(os.listdir(folder)))
for name, patterns in (
    ("*.json", {"allow_patterns": ["*.json"]}),
    ("no pattern", {}),
    ("all but *.gguf", {"ignore_patterns": ["*.gguf"]}),
):
    try:
        found = " ".join(sorted(os.listdir(snapshot_download("o/m", local_files_only=True, **patterns))))
    except OSError as error:
        missing = str(error).partition("incomplete: ")[2].partition(". ")[0]
        found = f"{type(error).__name__}: {missing}"
    print(f"offline, {name}: {found}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/offline.py" "$directory/cache")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
fetched with *.json: config.json tokenizer.json
offline, *.json: config.json tokenizer.json
offline, no pattern: IncompleteSnapshotError: 2 file(s) are missing (README.md, model.gguf)
offline, all but *.gguf: IncompleteSnapshotError: 1 file(s) are missing (README.md)
SEEN
