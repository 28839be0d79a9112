# SPDX-License-Identifier: Apache-2.0
"""Servers on loopback that publish acceptance as vLLM, SGLang or TensorRT-LLM do, and accept drafts at given rates."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tests.loopback import Handler, listening
from tests.observe.traffic.pages import counters

HEALTHY = tuple(0.87**position for position in range(1, 16))
"""Shares of passes that accept each of 15 drafts: tau 6.9, as of Qwen3-8B with its draft."""
LONG = 4000  # characters of a long prompt
OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm"}


class LookAlike:
    """A server's counters; the shares of accepted drafts may differ for long contexts and repeated prompts."""

    def __init__(
        self, kind: str, rates: Sequence[float], *, model: str, long: Sequence[float] | None = None,
        again: Sequence[float] | None = None, publishes: bool = True, seed: int = 0,
        refuses: Callable[[dict[str, object]], bool] = lambda _: False, engines: int = 1, dead: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.kind, self.model, self.publishes, self.refuses = kind, model, publishes, refuses
        self._rates, self._long, self._again = rates, long or rates, again or rates
        self._random, self._seen = random.Random(seed), set[str]()
        self._requests = 0
        self._dead = dead
        self._passes, self._tokens = [0] * engines, [0] * engines
        self._positions = [[0] * len(rates) for _ in range(engines)]

    def answer(self, body: dict[str, object]) -> str:
        """The stream of one answer; texts depend on prompt and seed."""
        prompt = json.dumps(body["messages"])
        rates = self._long if len(prompt) > LONG else self._again if prompt in self._seen else self._rates
        if len(prompt) > 1000:
            self._seen.add(prompt)
        tokens, emitted = int(str(body["max_tokens"])), 1
        engine = self._requests % len(self._passes)
        if engine in self._dead:
            rates = [0.0] * len(rates)
        while emitted < tokens and rates:
            share = self._random.random()
            accepted = sum(share < rate for rate in rates)
            self._passes[engine] += 1
            for position in range(accepted):
                self._positions[engine][position] += 1
            emitted += accepted + 1
        self._requests += 1
        self._tokens[engine] += tokens if self.kind != "sglang" else max(emitted, tokens) - 1
        text = f"{hash(prompt)} {body.get('seed')}"
        usage = {"prompt_tokens": len(prompt) // 3, "completion_tokens": tokens}
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length"}
        events = (json.dumps({"choices": [choice]}), json.dumps({"choices": [], "usage": usage}), "[DONE]")
        return "".join(f"data: {event}\n\n" for event in events)

    def page(self, path: str) -> str | None:
        """A GET; None: 404."""
        length = {"max_model_len": 32768} if self.kind == "vllm" else {}
        card = {"id": self.model, "object": "model", "owned_by": OWNERS[self.kind], **length}
        about = {"version": "1", "speculative_num_draft_tokens": len(self._rates) + 1, "model_path": self.model}
        pages = {"/v1/models": json.dumps({"data": [card]}), "/version": '{"version": "1"}'}
        if self.kind == "sglang":
            pages["/server_info"] = json.dumps(about)
        if self.kind == "tensorrt-llm":
            pages["/metrics"] = "[]"
        if self.publishes:
            pages["/prometheus/metrics" if self.kind == "tensorrt-llm" else "/metrics"] = self._metrics()
        return pages.get(path)

    def _metrics(self) -> str:
        lines: list[str] = []
        if self.kind == "vllm":
            for engine, counts in enumerate(zip(self._passes, self._positions, self._tokens, strict=True)):
                lines += counters("vllm", *counts, f'engine="{engine}"')
        else:
            positions = list(map(sum, zip(*self._positions, strict=True)))
            lines += counters(self.kind, sum(self._passes), positions, sum(self._tokens), requests=self._requests)
        return "\n".join(lines) + "\n"


def running(server: LookAlike) -> AbstractContextManager[str]:
    """Serves on loopback; gives the URL."""
    lock = threading.Lock()

    class Running(Handler):
        protocol_version = "HTTP/1.1"

        def get(self) -> None:
            with lock:
                self._send(server.page(self.path))

        def post(self) -> None:
            body = json.loads(self.body())
            if server.refuses(body):
                self.answer(400, b'{"error": {"message": "not here"}}')
                return
            with lock:
                self._send(server.answer(body))

        def _send(self, text: str | None) -> None:
            self.answer(404 if text is None else 200, (text or "").encode())

    return listening(Running)
