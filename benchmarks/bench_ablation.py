# SPDX-License-Identifier: Apache-2.0
"""Measures each hand-written piece of the CPU path: CPU time of a step without it over that with it, one at a time.

Two processes, one with everything and one without the piece, take turns over the same steps of the same requests on
one thread; a cell is the median of the ratios of neighbours. "plain" decodes without a drafter, "idle drafter" with one
whose context grows unused, "DFlash" verifies whole blocks, "sampled" does so at temperature 0.8 and top_p 0.9. A piece
that brings less than a tenth everywhere is to be deleted (DESIGN: runtime).

The pair of Qwen3-0.6B's shape has random weights: its steps cost what they would, but accept about one token each.
Prints tables, asserts nothing.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import random_prompts, write_pair  # noqa: E402
from dflash_trt.api.runtime_options import Dtype, RuntimeOptions  # noqa: E402
from dflash_trt.api.sampling_params import SamplingParams  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime import accept  # noqa: E402
from dflash_trt.runtime.cpu import accelerate as cpu  # noqa: E402
from dflash_trt.runtime.decoder import Decoder  # noqa: E402
from dflash_trt.runtime.drafter import drafter  # noqa: E402
from dflash_trt.runtime.drafter.onnxruntime import graph_session  # noqa: E402
from dflash_trt.runtime.kvcache.slots import SlotPool  # noqa: E402
from dflash_trt.runtime.load import open_session  # noqa: E402
from dflash_trt.runtime.model_runner import ModelRunner  # noqa: E402
from dflash_trt.runtime.policy.draft_length import FixedLength  # noqa: E402
from dflash_trt.runtime.session import Session  # noqa: E402
from dflash_trt.runtime.targets import packed_target  # noqa: E402
from dflash_trt.runtime.targets.packed_pass import GatheredPass  # noqa: E402
from tests import decoding  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

TYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
REAL = "qwen3-0.6b-shape"
WAYS = ("plain", "idle drafter", "DFlash", "sampled")
PLAIN_AND_DFLASH = ("plain", "DFlash")
MAX_TOKENS = 384
REAL_PROMPT = 8
"""Tokens: reading longer ones would take most of the time."""
TEMPERATURE, TOP_P = 0.8, 0.9


def sample_by_torch(logits: torch.Tensor) -> torch.Tensor:
    """Draws a token [n] from each row of logits [n, V], with other random numbers than `_C.accept_rows`."""
    scores, order = (logits / TEMPERATURE).sort(dim=-1, descending=True)
    shares = scores.softmax(dim=-1)
    shares[shares.cumsum(dim=-1) - shares >= TOP_P] = 0
    return order.gather(1, torch.multinomial(shares, 1)).flatten()


def accept_by_torch(choose: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., list[list[int]]]:
    """`_C.accept_rows` with tokens that `choose` takes from all rows at once."""

    def accept_rows(
        logits: Any, num_rows: list[int], num_skipped: list[int], answers: object, proposals: list[Any]
    ) -> list[list[int]]:
        chosen, accepted, begin = choose(torch.from_numpy(logits)).tolist(), [], 0
        for rows, skipped, drafts in zip(num_rows, num_skipped, proposals, strict=True):
            own, begin = chosen[begin + skipped : begin + rows], begin + rows
            pairs = enumerate(zip(drafts.token_ids, own, strict=False))
            accepted.append(own[: next((i for i, (a, b) in pairs if a != b), len(drafts.token_ids)) + 1])
        return accepted

    return accept_rows


def nothing(*_: object) -> bool:
    return False


def without(owner: object, name: str, replacement: object = nothing) -> Callable[[], Any]:
    return lambda: patch.object(owner, name, replacement)


@contextmanager
def greedy_in_torch() -> Iterator[None]:
    with accepting(argmax_by_torch), patch.object(drafter, "argmax", argmax_by_torch):
        yield


def argmax_by_torch(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


@contextmanager
def accepting(choose: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    class Compiled:
        accept_rows = staticmethod(accept_by_torch(choose))

        def __getattr__(self, name: str) -> Any:
            from dflash_trt import _C

            return getattr(_C, name)

    with patch.object(accept, "_C", Compiled()):
        yield


PIECES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "linear layers, FP32": (without(cpu, "lay_out_linear_layers"), PLAIN_AND_DFLASH),
    "linear layers, BF16": (without(cpu, "replace_linear_layers"), PLAIN_AND_DFLASH),
    "experts": (without(cpu, "group_experts"), PLAIN_AND_DFLASH),
    "paged attention": (without(cpu, "PagedPass", GatheredPass), PLAIN_AND_DFLASH),
    "RMSNorm of the target": (without(cpu, "fuse_norms"), PLAIN_AND_DFLASH),
    "caught taps": (without(packed_target, "Taps", lambda *_: None), ("idle drafter", "DFlash")),
    "PackedLinear": (
        without(graph_session, "pack_linear_layers", lambda *_: None),
        ("DFlash",),
    ),
    "greedy choice": (greedy_in_torch, PLAIN_AND_DFLASH),
    "sampling": (lambda: accepting(sample_by_torch), ("sampled",)),
}
"""How each is switched off, and the ways to decode in which it takes part."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A pair whose steps are measured."""

    name: str
    engine: Path
    target: Path
    dtype: Dtype
    batches: tuple[int, ...]

    def open(self) -> tuple[Session, list[list[int]]]:
        """The loaded pair, and prompts."""
        slots = max(self.batches)
        if self.name == REAL:
            return decoding.open_without_tokenizer(self.engine, self.target, num_slots=slots, dtype=self.dtype), [
                prompt[:REAL_PROMPT] for prompt in random_prompts(slots)
            ]
        options = RuntimeOptions(max_batch_size=slots, device="cpu", dtype=self.dtype)
        session = open_session(self.engine, str(self.target), options)
        return session, prompts(session)[:slots]


class Steps:
    """Steps of one way to decode over a full batch."""

    def __init__(self, session: Session, texts: list[list[int]], way: str, batch: int) -> None:
        self._session, self._texts, self._way, self._batch = session, texts[:batch], way, batch
        self._block = 1 if way in ("plain", "idle drafter") else session.manifest.draft.block_size
        self._begin()

    def run(self, count: int) -> float:
        """CPU seconds of `count` steps in which every request decodes."""
        if (
            min(request.params.max_tokens - len(request.answer) for request in self._decoder.running.values())
            <= count * self._block
        ):
            self.end()
            self._begin()
        begin = time.process_time()
        for _ in range(count):
            self._decoder.step()
        assert len(self._decoder.running) == self._batch
        return time.process_time() - begin

    def end(self) -> None:
        """Leaves the session to the next decoder."""
        for request in [*self._decoder.running.values()]:
            self._decoder.cancel(request)

    def _begin(self) -> None:
        session = self._session
        slots = SlotPool(self._batch, session.decoder().slots.num_tokens)
        local = ModelRunner(session.target, None if self._way == "plain" else session.drafter)
        self._decoder = Decoder(local, slots, FixedLength(self._block - 1))
        params = decoding.greedy(MAX_TOKENS)
        if self._way == "sampled":
            params = SamplingParams(
                max_tokens=MAX_TOKENS, ignore_eos=True, temperature=TEMPERATURE, top_p=TOP_P, seed=1
            )
        for text in self._texts:
            self._decoder.add(session.request(text, params))
        while not all(request.is_prefilled for request in self._decoder.running.values()) or self._decoder.waiting:
            self._decoder.step()
        self._decoder.step()  # the first that drafts makes the prompt context


def serve_in_thread(connection: Connection, job: Job, piece: str | None) -> None:
    """Decodes in a thread, as `LLM` does: its heap is not the main one."""
    thread = threading.Thread(target=serve, args=(connection, job, piece))
    thread.start()
    thread.join()


def serve(connection: Connection, job: Job, piece: str | None) -> None:
    """Measures steps as it is asked to: a way and a batch begin a new decoder, a number is that of its steps."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if piece is not None:
            stack.enter_context(PIECES[piece][0]())
        session, texts = job.open()
        connection.send(None)
        steps: Steps | None = None
        while (asked := connection.recv()) is not None:
            if isinstance(asked, tuple):
                if steps is not None:
                    steps.end()
                steps = Steps(session, texts, *asked)
                connection.send(None)
            elif steps is not None:
                connection.send(steps.run(asked))


class Worker:
    """Such a process."""

    def __init__(self, job: Job, piece: str | None) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_in_thread, args=(theirs, job, piece), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()

    def ask(self, question: object) -> Any:
        self._connection.send(question)
        return self._connection.recv()

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


def compare(whole: Worker, lacking: Worker, way: str, batch: int, pairs: int, seconds: float) -> tuple[float, float]:
    """Median of the ratios lacking / whole, and milliseconds of a whole step."""
    for worker in (whole, lacking):
        worker.ask((way, batch))
    first = whole.ask(1)
    lacking.ask(1)
    count = max(1, min(20, round(seconds / first)))
    ratios, times = [], []
    for turn in range(pairs):
        order = (whole, lacking) if turn % 2 else (lacking, whole)
        taken = {worker: worker.ask(count) for worker in order}
        ratios.append(taken[lacking] / taken[whole])
        times.append(taken[whole] / count)
    return statistics.median(ratios), 1e3 * statistics.median(times)


@click.command()
@click.option("--pair", "names", multiple=True, type=click.Choice([*PAIRS, REAL]), default=(*PAIRS, REAL))
@click.option("--piece", "pieces", multiple=True, type=click.Choice([*PIECES]), default=tuple(PIECES))
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), default=WAYS, help="To decode.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 16), show_default=True)
@click.option("--pairs", default=7, show_default=True, help=f"Of measurements in turn; {REAL} has a third.")
@click.option("--seconds", default=0.1, show_default=True, help="CPU time of a measurement, about, or one step.")
def main(
    names: Sequence[str],
    pieces: Sequence[str],
    ways: Sequence[str],
    batches: tuple[int, ...],
    pairs: int,
    seconds: float,
) -> None:
    """Print the ratio of a step without each piece to one with all."""
    torch.set_num_threads(1)  # before it starts any, which a fork would not have
    click.echo(f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}, one thread, torch {torch.__version__}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name == REAL:
                target, draft = write_pair(Path(folder))
            else:
                target, draft = FIXTURES / name, FIXTURES / f"{name}-dflash"
            build(draft, Path(folder) / "engine", target)
            for dtype in TYPES:
                job = Job(name=name, engine=Path(folder) / "engine", target=target, dtype=dtype, batches=batches)
                chosen = [piece for piece in pieces if takes_part(piece, name, dtype)]
                if chosen:
                    measure(job, chosen, ways, max(2, pairs // 3) if name == REAL else pairs, seconds)


def takes_part(piece: str, name: str, dtype: str) -> bool:
    """Whether a pair has the piece; in BF16 only what it has a kernel of its own for is measured."""
    if dtype == "bfloat16":
        return piece in ("experts", "paged attention") if "oss" in name else piece == "linear layers, BF16"
    return not piece.endswith("BF16") and (piece != "experts" or "oss" in name)


def measure(job: Job, pieces: Sequence[str], ways: Sequence[str], pairs: int, seconds: float) -> None:
    """Print a pair's table, row by row as they are there."""
    whole, rows = Worker(job, None), []
    columns = [(way, batch) for way in ways for batch in job.batches]
    for piece in pieces:
        lacking = Worker(job, piece)
        cells = []
        for way, batch in columns:
            if way not in PIECES[piece][1]:
                cells.append("")
                continue
            ratio, milliseconds = compare(whole, lacking, way, batch, pairs, seconds)
            cells.append(f"{ratio:.2f} ({milliseconds:.3g} ms)")
        lacking.end()
        rows.append((piece, *cells))
        click.echo(f"{job.name} {job.dtype}: {piece}: {', '.join(filter(None, cells))}", err=True)
    whole.end()
    print_table(f"{job.name}, {job.dtype}", ("without", *(f"{way}, batch {batch}" for way, batch in columns)), rows)


if __name__ == "__main__":
    main()
