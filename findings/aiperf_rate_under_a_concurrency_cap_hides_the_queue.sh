#!/usr/bin/env bash
# AIPerf 0.13.0: with --request-rate and --concurrency together, the wait for a free place is in no latency.
#
# 40 requests a second are asked for, one may run at a time, each takes 100 ms. The load generator sends what the
# cap allows, below 10 a second, and starts a request's clock when it is sent, not when it was due. The reported
# latency is that of an idle server, and there is no warning: a server that cannot hold the rate looks fine.
#
# Expected: latencies that grow as the queue does (seconds), or a warning that the rate was not reached.
set -euo pipefail

directory=$(mktemp -d)
trap 'kill "$server" 2>/dev/null; rm -rf "$directory"' EXIT
cat > "$directory/server.py" <<'PYTHON'
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Chat completions that take 100 ms."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(0.1)
        message = {"role": "assistant", "content": "one two three four"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON
python3 "$directory/server.py" > "$directory/port" & server=$!
until [ -s "$directory/port" ]; do sleep 0.1; done

python3 -m venv "$directory/venv"
pip=("$directory/venv/bin/pip" install --quiet --disable-pip-version-check)
# Without what this run does not import: pyarrow, SciPy, Matplotlib, dash, a Kubernetes client and others.
"${pip[@]}" \
  aiofiles==24.1.0 aiohttp==3.14.5 aiosqlite==0.22.1 crick==0.0.8 cyclopts==4.25.3 fastapi==0.165.0 \
  ffmpeg-python==0.2.0 huggingface_hub==1.33.0 Jinja2==3.1.6 jmespath==1.0.1 msgspec==0.22.0 numpy==2.4.6 \
  nvidia-ml-py==13.615.71 orjson==3.11.9 pandas==2.3.3 pillow==12.3.0 prometheus_client==0.23.1 protobuf==7.36.2 \
  psutil==7.0.0 pydantic==2.14.4 pydantic-settings==2.16.3 python-multipart==0.0.34 pyzmq==26.4.0 rich==14.1.0 \
  ruamel.yaml==0.18.17 setproctitle==1.3.8 starlette-compress==2.0.0 textual==5.3.0 tqdm==4.70.1 \
  transformers==5.24.0 uvicorn==0.54.0 uvloop==0.23.0 zstandard==0.25.0
"${pip[@]}" --no-deps aiperf==0.13.0
"$directory/venv/bin/python" - "$directory" <<'PYTHON'
import json
import pathlib
import sys

from tokenizers import Tokenizer, models, pre_tokenizers

directory = pathlib.Path(sys.argv[1])
(directory / "tokenizer").mkdir()
words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save(str(directory / "tokenizer" / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
(directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
(directory / "prompts.jsonl").write_text('{"text": "one two one two"}\n' * 60)
PYTHON
"$directory/venv/bin/aiperf" profile --model m --url "http://127.0.0.1:$(cat "$directory/port")" --endpoint-type chat \
  --tokenizer "$directory/tokenizer" --input-file "$directory/prompts.jsonl" --custom-dataset-type single_turn \
  --request-count 60 --request-rate 40 --concurrency 1 \
  --output-artifact-dir "$directory/run" --ui-type none --no-gpu-telemetry --no-server-metrics > "$directory/log" 2>&1 \
  || { tail -20 "$directory/log"; exit 1; }

cat > "$directory/latency.py" <<'PYTHON'
import json
import pathlib
import sys

directory = pathlib.Path(sys.argv[1])
(export,) = directory.rglob("profile_export_aiperf.json")
metrics = json.loads(export.read_text())
rate, latency = metrics["request_throughput"]["avg"], metrics["request_latency"]
print(f"sent {rate:.1f}/s; latency: mean {latency['avg']:.0f} ms, p99 {latency['p99']:.0f} ms", file=sys.stderr)
print(f"asked for 40 requests/s, sent fewer than 12: {rate < 12}")
print(f"the last ones wait 3 s for their place; p99 of the latency below 0.5 s: {latency['p99'] < 500}")
said = any("rate" in line.lower() and "warn" in line.lower() for line in (directory / "log").read_text().splitlines())
print(f"a warning about the rate: {said}")
PYTHON

seen=$(python3 "$directory/latency.py" "$directory")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
asked for 40 requests/s, sent fewer than 12: True
the last ones wait 3 s for their place; p99 of the latency below 0.5 s: True
a warning about the rate: False
SEEN
