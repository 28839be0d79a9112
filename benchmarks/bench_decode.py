# SPDX-License-Identifier: Apache-2.0
"""Decoding on this machine's CPU: plain, DFlash and DFlash with auto at several batch sizes, and two peers.

All ways run in turn over the same prompts, several rounds, in one process; a row's time is the median round. Ratios
compare each DFlash with the plain decoding of its own runtime at the same batch size. "host" is what a step spends
outside the forward calls of target and drafter, embeddings and lm_head included in those. The target computes in
FP32, as by default, and where a row says so in BF16, whose text is its own.

The fixtures decode held-out prompts. The pair of Qwen3-0.6B's shape has random weights, and its acceptance is forced
(forced_acceptance.py): times mean something there, text does not. vLLM runs where --vllm-python names an environment
that has it, before the others, in a process of its own, with the same forced acceptance by its own means.
Prints tables, asserts nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import onnxruntime
import torch
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import ForcedRunner, random_prompts, write_pair  # noqa: E402
from benchmarks.ways import COLUMNS, Answers, Way, measure  # noqa: E402
from dflash_trt.api.runtime_options import Dtype, RuntimeOptions  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.decoder import Decoder  # noqa: E402
from dflash_trt.runtime.drafter.onnxruntime import graph_session  # noqa: E402
from dflash_trt.runtime.load import open_session  # noqa: E402
from dflash_trt.runtime.policy.draft_length import DraftLength, FixedLength  # noqa: E402
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length  # noqa: E402
from dflash_trt.runtime.request import Request  # noqa: E402
from dflash_trt.runtime.session import Session, run  # noqa: E402
from tests.decoding import greedy, open_without_tokenizer  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant, load_target, plain_greedy  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

HOST_RUNS = 3
HOST = "host, ms a step"
REAL = "qwen3-0.6b-shape"
DFLASH2 = "tiny-qwen3-dflash2"
TYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BF16 = ", BF16"
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(kw_only=True)
class Job:
    """A pair and what it decodes."""

    name: str
    target: Path
    draft: Path
    prompts: list[list[int]]
    tokens: int
    batches: tuple[int, ...]
    rounds: int
    draft_length: str | None
    is_forced: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}, random weights, FORCED ACCEPTANCE" if self.is_forced else self.name


class Forwards:
    """Seconds spent in forward calls while it watches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watch(self, session: Session) -> Iterator[None]:
        """Times the calls into models and ONNX Runtime."""
        calls: list[tuple[object, str]] = [(session.target, name) for name in ("_forward", "logits", "embed")]
        calls.append((onnxruntime.InferenceSession, "run_with_iobinding"))
        with ExitStack() as stack:
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


@click.command()
@click.option("--pair", "pairs", multiple=True, type=click.Choice([*PAIRS, DFLASH2, REAL]), default=(*PAIRS, REAL))
@click.option("--prompts", "num_prompts", default=16, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="New tokens a prompt.")
@click.option("--real-prompts", default=4, show_default=True, help=f"--prompts of {REAL}, or one for each of a batch.")
@click.option("--real-tokens", default=32, show_default=True, help=f"--tokens of {REAL}.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 16, 32), show_default=True)
@click.option("--draft-length", default=None, help="A value for `generate --draft-length`; the whole block by default.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch, and of vLLM.")
@click.option("--ort-threads", default=None, type=int, help="Threads of ONNX Runtime, in the place of our own rule.")
@click.option("--vllm-python", default=None, help="A Python that has vllm-cpu.")
def main(
    pairs: tuple[str, ...],
    num_prompts: int,
    tokens: int,
    real_prompts: int,
    real_tokens: int,
    rounds: int,
    batches: tuple[int, ...],
    draft_length: str | None,
    threads: int,
    ort_threads: int | None,
    vllm_python: str | None,
) -> None:
    """Measure tokens/s, steps and tau of every way to decode."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "onnxruntime"))
    rule = "by our rule" if ort_threads is None else str(ort_threads)
    click.echo(f"{cpu_model()}, threads: torch {threads}, ONNX Runtime {rule}; {versions}")
    for name in pairs:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if ort_threads is not None:
                stack.enter_context(patch.object(graph_session, "num_threads", lambda _: ort_threads))
            if name == REAL:
                target, draft = write_pair(Path(folder))
                texts = random_prompts(max(real_prompts, *batches))
            else:
                target = FIXTURES / name.removesuffix("-dflash2")
                draft = FIXTURES / (name if name == DFLASH2 else f"{name}-dflash")
                texts = prompts(target)[:num_prompts]
            job = Job(
                name=name, target=target, draft=draft, prompts=texts, tokens=real_tokens if name == REAL else tokens,
                batches=batches, rounds=rounds, draft_length=draft_length, is_forced=name == REAL,
            )  # fmt: skip
            peers = list(_vllm(job, vllm_python, threads, Path(folder))) if vllm_python else []
            build(job.draft, engine := Path(folder) / "engine", job.target)
            ours = [way for dtype in TYPES for way in _ours(job, engine, dtype)]
            ways = [*ours, *_transformers(job), *peers]
            measure([way for way in ways if way.run is not None], rounds)
            _print(job, ways)


def _prompts(job: Job, batch: int) -> list[list[int]]:
    """All of a fixture's; of the real shape a batch of them, or as many as is worth measuring."""
    return job.prompts[: max(batch, 2)] if job.is_forced else job.prompts


def _ours(job: Job, engine: Path, dtype: Dtype) -> Iterator[Way]:
    num_slots = max(job.batches)
    if job.is_forced:
        session = open_without_tokenizer(engine, job.target, num_slots=num_slots, dtype=dtype)
    else:
        session = open_session(engine, str(job.target), RuntimeOptions(max_batch_size=num_slots, dtype=dtype))
    suffix = BF16 if dtype == "bfloat16" else ""
    block = session.manifest.draft.num_draft_tokens
    answers: dict[tuple[int, ...], list[int]] = {}
    if job.is_forced:
        done = run(session.plain_decoder(), [session.request(p, greedy(job.tokens)) for p in job.prompts])
        answers = {tuple(p): answer.token_ids for p, answer in zip(job.prompts, done, strict=True)}

    def speculative(length: DraftLength, batch: int) -> Decoder:
        if job.is_forced:
            return ForcedRunner(session, answers, length, batch).decoder
        return session.decoder(length, max_batch_size=batch)

    def decode(decoder: Decoder, batch: int) -> Answers:
        found = run(decoder, [session.request(prompt, greedy(job.tokens)) for prompt in _prompts(job, batch)])
        return Answers([answer.token_ids for answer in found], sum(answer.steps for answer in found))

    for batch in job.batches:
        fixed = parse_draft_length(job.draft_length or str(block), block)
        auto = parse_draft_length("auto", block)  # keeps its measurements, as in a server
        plain = Way(
            f"dflash-trt plain{suffix}",
            batch,
            lambda b=batch: decode(session.decoder(FixedLength(0), max_batch_size=b), b),
        )
        full = Way(f"dflash-trt DFlash{suffix}", batch, lambda b=batch, f=fixed: decode(speculative(f, b), b), plain)
        full.host_milliseconds = statistics.median(
            _host(
                session,
                speculative(fixed, batch),
                [session.request(prompt, greedy(job.tokens)) for prompt in job.prompts[:batch]],
            )
            for _ in range(HOST_RUNS)
        )
        yield from (plain, full)
        if not suffix:
            yield Way("dflash-trt auto", batch, lambda b=batch, a=auto: decode(speculative(a, b), b), plain)


def _host(session: Session, decoder: Decoder, requests: list[Request]) -> float:
    """Milliseconds a pass that are not spent in forward calls, over one full batch."""
    forwards = Forwards()
    session.warm_up(requests[0].prompt_ids)
    with forwards.watch(session):
        begin = time.perf_counter()
        run(decoder, requests)
        seconds = time.perf_counter() - begin
    return (seconds - forwards.seconds) / decoder.metrics().passes * 1e3


def _transformers(job: Job) -> Iterator[Way]:
    """Ways to decode by transformers, whose DFlash has no forced acceptance."""
    model, chosen = load_target(job.target), _prompts(job, 1)

    def plain() -> Answers:
        outputs = [plain_greedy(model, prompt, job.tokens, eos_ids=()) for prompt in chosen]
        return Answers(outputs, sum(len(output) - 1 for output in outputs))

    baseline = Way("transformers plain", 1, plain)
    yield baseline
    if job.is_forced or job.name == DFLASH2:  # transformers lacks it
        return
    assistant = load_assistant(job.draft)

    def speculative() -> Answers:
        runs = [dflash_greedy(model, assistant, prompt, job.tokens, eos_ids=()) for prompt in chosen]
        return Answers([run.output_ids for run in runs], sum(run.steps for run in runs))

    yield Way("transformers DFlash", 1, speculative, baseline)


def _vllm(job: Job, python: str, threads: int, folder: Path) -> Iterator[Way]:
    """Measured one after the other, in processes of their own, while nothing else runs."""
    draft = {"method": "dflash", "model": str(job.draft), "num_speculative_tokens": _num_draft_tokens(job)}
    plain = _run_vllm(job, None, python, threads, folder)
    # vLLM's CPU sampler refuses synthetic acceptance ("not supported with CPU sampling", vllm 0.32).
    speculative = None if job.is_forced else _run_vllm(job, draft, python, threads, folder)
    for batch in job.batches:
        ways: list[Way] = []
        for name, runs in (("vllm plain", plain), ("vllm DFlash", speculative)):
            if runs is None:
                continue
            found = runs[str(batch)]
            way = Way(name, batch, None, plain=ways[0] if ways else None)
            outputs: list[list[int]] = found["outputs"]
            way.seconds = found["seconds"]
            way.answers = Answers(outputs, int(found["steps"]) or sum(map(len, outputs)) - len(outputs))
            ways.append(way)
        yield from ways


def _run_vllm(job: Job, draft: dict[str, Any] | None, python: str, threads: int, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": str(job.target), "draft": draft, "tokens": job.tokens, "rounds": job.rounds}
    facts["batches"] = {str(batch): _prompts(job, batch) for batch in job.batches}
    environment = os.environ | VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    words = [python, str(REPOSITORY / "benchmarks" / "vllm_decode.py"), str(folder / "vllm.json")]
    with (folder / "vllm.log").open("w") as log:
        code = subprocess.run(
            words, input=json.dumps(facts), text=True, env=environment, stdout=log, stderr=log
        ).returncode
    if code:
        raise click.ClickException(f"vLLM failed:\n{(folder / 'vllm.log').read_text()[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "vllm.json").read_text())
    return found


def _num_draft_tokens(job: Job) -> int:
    return int(json.loads((job.draft / "config.json").read_text())["block_size"]) - 1


def _print(job: Job, ways: list[Way]) -> None:
    rows = []
    for way in ways:
        host = "" if way.host_milliseconds is None else f"{way.host_milliseconds:.2f}"
        rows.append((*way.cells, host))
    different = sorted({f"{way.name} at {way.batch}" for way in ways if not _agrees(way, ways[0], job)})
    tokens = f"TOKENS DIFFER: {', '.join(different)}" if different else "identical tokens"
    shape = f"{len(ways[0].outputs)}+ prompts x {job.tokens} tokens, median of {job.rounds} rounds"
    print_table(f"{job.title}: {shape}; {tokens}", (*COLUMNS, HOST), rows)


def _agrees(way: Way, first: Way, job: Job) -> bool:
    """vLLM's forced acceptance emits what the draft proposed, and so another text; BF16 agrees with its own plain."""
    if job.is_forced and way.name == "vllm DFlash":
        return True
    if way.name.endswith(BF16):
        first = way.plain or way
    return all(a == b for a, b in zip(way.outputs, first.outputs, strict=False))


if __name__ == "__main__":
    main()
