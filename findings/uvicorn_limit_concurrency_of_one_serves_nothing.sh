#!/usr/bin/env bash
# uvicorn 0.54.0: limit_concurrency=N serves N - 1 clients, and idle keep-alive connections are among them.
#
# The limit is compared with the number of open connections, the asking one included, and a request is refused when
# they reach it. With a limit of 1 every request gets 503, on an idle server too. With 3, two clients that keep their
# connections open without asking anything shut out all others. A limit sized to the slots of an LLM's batch, or to
# bound its queue, turns clients with connection pools away while the GPU is idle.
#
# Expected: N requests at a time are served; connections without a request do not count.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0 h11==0.16.0

cat > "$directory/limit.py" <<'PYTHON'
import http.client
import threading
import time

import uvicorn


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def ask(connection):
    connection.request("GET", "/")
    response = connection.getresponse()
    response.read()
    return response.status


for limit in (1, 2, 3):
    config = uvicorn.Config(answer, port=0, limit_concurrency=limit, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    clients = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(3)]
    print(f"limit {limit}: three clients ask, each after the answer to the one before: {[ask(c) for c in clients]}")
    server.should_exit = True
    thread.join()
PYTHON

seen=$("$directory/venv/bin/python" "$directory/limit.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
limit 1: three clients ask, each after the answer to the one before: [503, 503, 503]
limit 2: three clients ask, each after the answer to the one before: [200, 503, 503]
limit 3: three clients ask, each after the answer to the one before: [200, 200, 503]
SEEN
