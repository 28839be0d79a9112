# SPDX-License-Identifier: Apache-2.0
"""A worker of bench_host.py: CPU seconds of a decoder's steps, without the models, which are stand-ins.

Runs in the interpreter of one installation of the package, this revision's or another one's, so it asks for modules
where either has them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny-qwen3"
OTHER_PACKAGE = "DFLASH_BENCH_PACKAGE"
"""Environment variable: directory of an installed package that is measured instead of this checkout."""
DIGITS = range(17, 27)
"""Tokens "0" to "9" of the fixture, of which the stand-ins' answers consist in this order."""
NUM_DRAFT_TOKENS = 7
STOP_IDS = frozenset({0})
PROMPT = 32
PAGE = 32
EMPTIED_BYTES = 2**26
MAX_STEPS = 4096
"""Measured ones before the answers begin again."""
WARM_UP = 12
"""Steps before the first measured one."""
LOGIT = 40.0
"""Logit of the token that follows; the others have 0, so that drawn tokens are the same."""


class Case(NamedTuple):
    """Kind of decoding, and the number of requests at once."""

    requests: int
    tau: int
    """Tokens of a step: one less is how many of the draft tokens are accepted."""
    sampled: bool = False
    plain: bool = False
    """Whether there is no drafter."""
    text: bool = False
    """Whether each step's new text is put on a queue, as for a stream."""
    stop: bool = False
    """Whether the request has stop texts, which never occur."""
    grammar: bool = False
    prefixes: bool = False
    logprobs: bool = False
    penalty: bool = False
    prompt: int = PROMPT
    answer: int = 0
    """Tokens that the answers have before the first measured step."""
    emptied: bool = False
    """Whether the caches are emptied before every step."""


class StandIns:
    """Target and drafter that continue any token with the next digit, and the CPU seconds that they take."""

    cache_bytes_per_token = cache_bytes_per_slot = 0
    keeps_prefixes = True
    is_asynchronous = False
    scorer = None

    def __init__(self, case: Case, vocab_size: int) -> None:
        import numpy as np
        import torch

        table = np.zeros((vocab_size, vocab_size), dtype=np.float32)
        following = np.arange(1, vocab_size + 1) % vocab_size
        following[DIGITS[-1]] = DIGITS[0]
        table[np.arange(vocab_size), following] = LOGIT
        right = np.empty((vocab_size, NUM_DRAFT_TOKENS), dtype=np.int64)
        for token in range(vocab_size):
            right[token, 0] = following[token]
            for place in range(1, NUM_DRAFT_TOKENS):
                right[token, place] = following[right[token, place - 1]]
        right[:, case.tau - 1 :] = 2  # token that never follows
        self._logits, self._proposals = torch.from_numpy(table), right
        self._of_tokens = first_of("dflash_trt.engine.proposals", "dflash_trt.runtime.drafter.candidate_selector")
        self._verified = import_module("dflash_trt.runtime.targets.target").Verified
        self._row = torch.zeros(1, 1)
        self.seconds = 0.0

    def verify(self, segments: Sequence[Any], *, with_taps: bool) -> Any:
        begin = time.thread_time()
        rows: list[int] = []
        num_rows = 0
        for segment in segments:
            num_rows += len(segment.token_ids)
            if segment.num_logits:
                rows += segment.token_ids[-segment.num_logits :]
        logits = self._logits[rows]
        tapped = [self._row.expand(num_rows, 1)] if with_taps else []
        self.seconds += time.thread_time() - begin
        return self._verified(logits=logits, tapped=tapped)

    def propose(self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Any = ()) -> list[Any]:
        begin = time.thread_time()
        proposals = [self._of_tokens.Proposals(row) for row in self._proposals[anchors, :num_tokens].tolist()]
        self.seconds += time.thread_time() - begin
        return proposals

    def start(self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Any = ()) -> Any:
        proposals = self.propose(slots, anchors, num_tokens, draws)
        return lambda: proposals

    def draftable(self, slots: Sequence[int]) -> list[int]:
        return list(slots)

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: Any, rows: Any = None) -> None:
        """Selects the rows as a drafter does; at earlier commits the runner has selected them."""
        if rows is not None:
            import torch

            with torch.inference_mode():
                begin, end = rows[0], rows[-1] + 1
                taps[begin:end] if end - begin == len(rows) else taps.index_select(0, torch.from_numpy(rows))

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        pass

    def rollback(self, slot: int, num_tokens: int) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def borrow(self, target: Any) -> None:
        pass

    def room(self, slot: int) -> int:
        return 1 << 20

    def fitting(self, slots: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        return list(num_rows)

    def can_propose(self, slot: int) -> bool:
        return True


def first_of(*names: str) -> Any:
    """The first of these modules that the package has."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            missing = error
    raise missing


def length_of(request: Any) -> int:
    """Tokens of the answer so far."""
    return len(request.answer) if hasattr(request, "answer") else len(request.token_ids)


class Steps:
    """A decoder in the middle of a case's answers."""

    def __init__(self, case: Case) -> None:
        import numpy as np

        self._case = case
        self._memory = np.ones(EMPTIED_BYTES // 8)
        self._queue: list[Any] = []
        self._tokenizer: Any = None
        self._vocab_size = 32
        if case.text or case.stop or case.grammar:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(FIXTURE))
            self._vocab_size = len(self._tokenizer)
        self._begin()

    def _begin(self) -> None:
        from dflash_trt.runtime.decoder import Decoder
        from dflash_trt.runtime.kvcache.slots import SlotPool
        from dflash_trt.runtime.model_runner import ModelRunner

        case, self._num_left = self._case, MAX_STEPS
        models: Any = StandIns(case, self._vocab_size)
        self._models = models

        class Runner(ModelRunner):
            """Has the drafter's pass in one call in every revision."""

            def draft(self, slots: Any, anchors: Any, draft_length: int, draws: Any = ()) -> Any:
                getattr(self, "catch_up", lambda: None)()
                return models.propose(slots, anchors, draft_length, draws)

        runner = Runner if hasattr(ModelRunner, "catch_up") else ModelRunner
        policy = first_of("dflash_trt.runtime.policy.draft_length", "dflash_trt.runtime.draft_length")
        self._max_tokens = case.answer + MAX_STEPS * case.tau
        num_tokens = case.requests * (case.prompt + self._max_tokens + PAGE)
        self._decoder = Decoder(
            runner(models, None if case.plain else models),
            SlotPool(case.requests, num_tokens, prefix_caching=case.prefixes),
            policy.FixedLength(0 if case.plain else NUM_DRAFT_TOKENS),
            prefill_chunk=case.requests * case.prompt,  # all prompts in one step, so that answers are equally long
        )
        for number in range(case.requests):
            self._decoder.add(self._request(number))
        while not all(request.is_prefilled for request in self._decoder.running.values()) or self._decoder.waiting:
            self._decoder.step()
        for _ in range(WARM_UP):
            self._decoder.step()
        while min(map(length_of, self._decoder.running.values())) < case.answer:
            self._decoder.step()
            self._queue.clear()

    def run(self, num_steps: int) -> list[float]:
        """CPU seconds of each step beside the models."""
        if self._num_left < num_steps + 2 * WARM_UP:
            self._begin()
        self._num_left -= num_steps
        seconds = []
        for _ in range(num_steps):
            if self._case.emptied:
                self._memory += 1
            self._queue.clear()
            before, begin = self._models.seconds, time.thread_time()
            self._decoder.step()
            seconds.append(time.thread_time() - begin - (self._models.seconds - before))
        lengths = set(map(length_of, self._decoder.running.values()))
        if len(self._decoder.running) < self._case.requests or max(lengths) - min(lengths) > self._case.tau:
            raise SystemExit(f"{self._case}: the answers have ended or differ in length")
        return seconds

    def _request(self, number: int) -> Any:
        from dflash_trt.api.sampling_params import SamplingParams
        from dflash_trt.runtime.request import Request
        from dflash_trt.runtime.text import TextStream

        case = self._case
        settings: dict[str, Any] = {"temperature": 0.8} if case.sampled else {"temperature": 0.0}
        settings |= {"logprobs": True} if case.logprobs else {}
        settings |= {"repetition_penalty": 1.0001} if case.penalty else {}
        settings |= {"stop": ["never", "\n\nx"]} if case.stop else {}
        params = SamplingParams(max_tokens=self._max_tokens, **settings)
        prompt = [*range(28, 48)] * (case.prompt // 20 + 1)
        prompt = [28 + number % 32, 28 + number // 32, *prompt[: case.prompt - 3], DIGITS[0]]
        request = Request(
            prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=STOP_IDS,
            text=TextStream(self._tokenizer, settings.get("stop", ())) if self._tokenizer is not None else None,
            processors=[self._grammar()] if case.grammar else [],
        )  # fmt: skip
        if case.text:
            reporter = first_of("dflash_trt.runtime.answer", "dflash_trt.runtime.embedded_backend")
            report = getattr(reporter, "chunk_reporter", None) or reporter._reporter
            request.on_progress = report(self._queue.append, True)
        return request

    def _grammar(self) -> Any:
        from dflash_trt.api.sampling_params import Grammar

        module = first_of("dflash_trt.runtime.grammars.compiler", "dflash_trt.runtime.logits_processors")
        if not hasattr(self, "_compiler"):
            self._compiler = module.GrammarCompiler(self._tokenizer, len(self._tokenizer), {0})
        return self._compiler.processor(Grammar(kind="regex", text="[0-9]*"))


def serve() -> None:
    """Reads cases and numbers of steps from standard input, and answers each with a line."""
    if package := os.environ.get(OTHER_PACKAGE):
        sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
        sys.path.insert(0, package)
        if not Path(import_module("dflash_trt").__file__ or "").is_relative_to(package):
            raise SystemExit(f"{package} is not what is imported")
    import torch

    from dflash_trt.errors import DFlashError

    torch.set_num_threads(1)
    steps = None
    for line in sys.stdin:
        words = line.split()
        if len(words) == 1 and steps is not None:
            print(*steps.run(int(words[0])), flush=True)
            continue
        steps = None
        try:
            steps = Steps(Case(*map(int, words)))  # type: ignore[arg-type]
        except (ModuleNotFoundError, DFlashError) as error:
            print(str(error).partition("\n")[0], flush=True)
        else:
            print("ready", flush=True)


if __name__ == "__main__":
    serve()
