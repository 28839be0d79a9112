# SPDX-License-Identifier: Apache-2.0
"""Serves a stand-in that costs nothing, for bench_server_host.py; the argument is the root of the commit to serve.

Each line on standard input sets the tokens of a step and the seconds between steps; the answer to it is the CPU time of
this process in seconds.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
TOKENIZER = REPOSITORY / "tests" / "fixtures" / "tiny-qwen3"
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{% endif %}"
K = 7
NUM_SLOTS, MAX_LENGTH = 256, 2**17


def use_package_of(root: Path) -> None:
    """Makes `import dflash_trt` find the sources below `root`; the compiled module is the installed one."""
    compiled = importlib.import_module("dflash_trt._C")
    for name in [name for name in sys.modules if name.partition(".")[0] == "dflash_trt"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(root))
    sys.modules["dflash_trt._C"] = compiled
    assert Path(str(importlib.import_module("dflash_trt").__file__)).is_relative_to(root)


class Answer:
    """A request that the stand-in answers with the times of its steps."""

    def __init__(self, num_tokens: int, put: Any, *, incremental: bool) -> None:
        self.num_tokens, self.put, self.incremental = num_tokens, put, incremental
        self.num_sent = 0
        self.steps: list[Any] = []
        self.is_cancelled = False
        self.client = ""


class Steps:
    """The stand-in's thread: a step adds tokens to all running answers, whose text is the time of the step."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 1, 0.01
        self.running: list[Answer] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, answer: Answer) -> None:
        with self._changed:
            self.running.append(answer)
            self._changed.notify()

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.running)
                running = list(self.running)
            due = max(due + self.seconds, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            accepted = time.perf_counter()
            ended = {id(answer) for answer in running if answer.is_cancelled or self._step(answer, accepted)}
            with self._changed:
                self.running = [answer for answer in self.running if id(answer) not in ended]

    def _step(self, answer: Answer, accepted: float) -> bool:
        """Whether the answer has ended."""
        from dflash_trt.api.acceptance import Step
        from dflash_trt.api.backend import Chunk

        number = min(self.tokens, answer.num_tokens - answer.num_sent)
        answer.num_sent += number
        tokens = tuple(range(100, 100 + number))
        step = Step(token_ids=tokens, proposals=(1,) * K, accepted=number - 1)
        answer.steps.append(step)
        is_last = answer.num_sent == answer.num_tokens
        if not (answer.incremental or is_last):
            return False
        answer.put(
            Chunk(
                text=f"{accepted:.6f} ",
                token_ids=list(tokens),
                steps=[step],
                emitted=[accepted],
                completion=self._completion(answer) if is_last else None,
            )
        )
        return is_last

    def _completion(self, answer: Answer) -> Any:
        from dflash_trt.api.acceptance import Acceptance
        from dflash_trt.api.completion import Completion

        return Completion(
            token_ids=[100] * answer.num_tokens, text="", finish_reason="length", stop_reason=None, logprobs=None,
            cumulative_logprob=None, seed=1, acceptance=Acceptance.of(answer.steps), arrived=time.perf_counter(),
            queue_seconds=0.0, ttft_seconds=0.01, itl_seconds=0.01, seconds=1.0, num_cached_tokens=0,
        )  # fmt: skip


def stand_in() -> tuple[Any, Steps]:
    """A backend whose requests cross into the event loop as those of the embedded runtime do."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from dflash_trt.api.acceptance import Acceptance
    from dflash_trt.api.backend import DecoderMetrics
    from dflash_trt.runtime.embedded_backend import EmbeddedBackend

    loaded = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")))
    loaded.chat_template = TEMPLATE
    steps = Steps()

    class StandIn(EmbeddedBackend):
        tokenizer, num_draft_tokens, is_alive, step_seconds, error = loaded, K, True, 0.0, None
        max_batch_size, max_length, unscaled_length = NUM_SLOTS, MAX_LENGTH, None

        def __init__(self) -> None:
            pass

        def request(self, prompt: Any, params: Any, put: Any, *, incremental: bool = True) -> Any:
            return Answer(params.max_tokens, put, incremental=incremental)

        def submit(self, request: Any) -> None:
            steps.submit(request)

        def cancel(self, request: Any) -> None:
            request.is_cancelled = True

        def metrics(self) -> DecoderMetrics:
            return DecoderMetrics(
                running=0, waiting=0, free_slots=0, free_cache_tokens=0, draft_length="", acceptance=Acceptance()
            )

        def close(self) -> None:
            pass

    return StandIn(), steps


def open_server() -> tuple[Any, Any, Steps]:
    """The server, its listening socket and the stand-in's thread, under the names of this commit or an older one."""
    from dflash_trt.runtime.server import endpoints
    from dflash_trt.runtime.server.app import make_app

    server = Path(str(endpoints.__file__)).parent
    rooms = ("connections.server", "connections.sockets") if (server / "connections").is_dir() else ("http_server",) * 2
    http_server, sockets = (importlib.import_module(f"dflash_trt.runtime.server.{room}") for room in rooms)
    backend, steps = stand_in()
    limits: dict[str, Any] = {"max_waiting": 1024, "max_body_bytes": 2**20}
    try:
        served = endpoints.Endpoints(backend, "model", **limits, max_answer_bytes=2**34)
    except TypeError:  # the older one has no limit of answers
        served = endpoints.Endpoints(backend, "model", **limits)
    return http_server.HttpServer(make_app(served, hosts=()), drain_seconds=1), sockets.bind("127.0.0.1", 0), steps


def collections_of_serve() -> AbstractContextManager[None]:
    """Does with the garbage collector what `dflash-trt serve` of this commit or an older one does."""
    try:
        return importlib.import_module("dflash_trt.runtime.server.garbage").rare_collections()
    except ModuleNotFoundError:
        gc.collect()
        gc.freeze()
        return nullcontext()


def obey(steps: Steps) -> None:
    for line in sys.stdin:
        tokens, seconds = line.split()
        steps.tokens, steps.seconds = int(tokens), float(seconds)
        print(time.process_time(), flush=True)


def main() -> None:
    use_package_of(Path(sys.argv[1]).resolve())
    server, listening, steps = open_server()
    threading.Thread(target=partial(obey, steps), daemon=True).start()
    with collections_of_serve():
        listening.listen(512)
        print(listening.getsockname()[1], flush=True)
        asyncio.run(server.serve([listening]))


if __name__ == "__main__":
    main()
