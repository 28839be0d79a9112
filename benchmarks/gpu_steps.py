# SPDX-License-Identifier: Apache-2.0
"""Steps of gpu_report.py that are no command of dflash-trt: each a process of its own."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forced_acceptance import SIZES
from benchmarks.ways import copy_rate, seconds_of
from dflash_trt.api import runtime_options
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.cli.output import print_table
from dflash_trt.device.launcher import CudaLauncher, CurrentStreamLauncher
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.jit_cache import SUFFIX
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_api import plugin_library
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.recorded_graph import RecordedGraph
from dflash_trt.engine.signatures import MAX_CONTEXT, TOKENS_PER_PAGE, num_pages_for
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import choose_executor
from dflash_trt.runtime.drafter.torch_executor import TorchExecutor
from tests.engine.plans.plan_layers import inspected_layers, summary, unfused
from tests.engines import build
from tests.reference.synthetic import write_random_draft

# Activations are BF16 on a GPU and FP32 in ONNX Runtime: 8 bits of mantissa, over a few layers.
TOLERANCE = 0.05
STEPS = ((3, 5), (1, 2), (60, 30))  # context rows of both slots before a block; the last are more than a plan takes
SHAPE = "gpt-oss-120b"
AIMS = {"bf16": 850, "fp8": 650}
"""Microseconds of its drafter's pass on an H100, for one block after 512 rows."""
ALGORITHMS = {"bf16": "", "fp8": "FP8", "nvfp4": "NVFP4"}
"""How tools/measured_passes.json calls a recipe's weights."""
LOWEST_TAU = 1.5
FAR = 2**31

Numbers = tuple[int, ...]


def _numbers(_context: click.Context, _option: click.Parameter, given: str) -> Numbers:
    return tuple(int(number) for number in given.split(","))


@click.group()
def steps() -> None:
    """Steps of gpu_report.py."""


engine_argument = click.argument("engine", type=click.Path(path_type=Path))
executor_option = click.option("--executor", type=click.Choice(["tensorrt", "torch"]), default="tensorrt")
device_option = click.option("--device", default="cuda")


@steps.command()
@engine_argument
@executor_option
@device_option
def parity(engine: Path, executor: str, device: str) -> None:
    """Run equal taps and blocks on a GPU and in ONNX Runtime; exit with 1 where they differ by more."""
    manifest = read_manifest(engine)
    ours = choose_executor(engine, manifest, device=device, executor=executor)
    errors = list(differences(manifest, ours, choose_executor(engine, manifest)))
    found = ", ".join(f"{100 * error:.2f} %" for error in errors)
    click.echo(f"hidden states after each step, {executor} less ONNX Runtime, of their root mean square: {found}")
    if not max(errors) < TOLERANCE:
        raise SystemExit(f"expected less than {100 * TOLERANCE:.0f} %, which BF16 explains")


def differences(manifest: Manifest, one: Executor, other: Executor) -> Iterator[float]:
    """Root mean square of the difference of both drafters' hidden states after each step, relative to `other`."""
    spec, rng = manifest.draft, torch.Generator().manual_seed(0)
    drafters = [Drafter.open(executor, spec, num_slots=2) for executor in (one, other)]
    for num_rows in STEPS:
        taps = torch.randn(sum(num_rows), spec.target_hidden_size, generator=rng)
        block = torch.randn(2, spec.block_size, spec.hidden_size, generator=rng)
        found, expected = (_step(drafter, num_rows, taps, block) for drafter in drafters)
        yield float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _step(drafter: Drafter, num_rows: tuple[int, int], taps: Tensor, block: Tensor) -> Tensor:
    device = drafter.executor.device
    drafter.inject((0, 1), num_rows, taps.to(device))
    return drafter.run((0, 1), block.to(device))["hidden"].float().clone().cpu()


@steps.command()
@engine_argument
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--num-prompts", default=16)
@click.option("--tokens", default=96)
@executor_option
@device_option
def decode(
    engine: Path,
    target: Path,
    num_prompts: int,
    tokens: int,
    executor: runtime_options.Executor,
    device: runtime_options.Device,
) -> None:
    """Greedy answers with the drafter and without drafts; exits with 1 where they differ, or few drafts hold."""
    from dflash_trt import LLM, SamplingParams

    lines = (target.parent / "prompts.jsonl").read_text().splitlines()[:num_prompts]
    texts, params = [json.loads(line)["prompt"] for line in lines], SamplingParams(max_tokens=tokens)
    lengths, problems = {"plain": 0, "DFlash": read_manifest(engine).draft.num_draft_tokens}, []
    open_llm = partial(LLM, engine, target, device=device, executor=executor)
    for batch in (1, 8):
        found, tau = [], 0.0
        for way, length in lengths.items():
            with open_llm(draft_length=length, max_batch_size=batch) as llm:
                llm.generate(texts, params, use_tqdm=False)  # records CUDA graphs
                begin = time.perf_counter()
                answers = llm.generate(texts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
            found.append([answer.token_ids for answer in answers])
            count, passes = sum(map(len, found[-1])), sum(answer.steps for answer in answers)
            tau = (count - len(texts)) / passes
            what = f"{way}, batch {batch}, {len(texts)} prompts: {count} tokens in {passes} steps, tau {tau:.2f}"
            click.echo(f"{what}, {count / seconds:.0f} tokens/s")
        if wrong := [text for text, one, other in zip(texts, *found, strict=True) if one != other]:
            problems.append(f"the tokens of plain decoding, found others in {len(wrong)}, first after {wrong[0]!r}")
        if tau < LOWEST_TAU:
            problems.append(f"a tau of at least {LOWEST_TAU}: the pair accepts more than that on a CPU")
    if problems:
        raise SystemExit("expected " + "; ".join(problems))


@steps.command()
@click.argument("recipe")
@engine_argument
@click.option("--layers", default=2, show_default=True)
@click.option("--max-batch-size", default=1, show_default=True)
@click.option("--max-seq-len", default=2048, show_default=True)
def drafter(recipe: str, engine: Path, layers: int, max_batch_size: int, max_seq_len: int) -> None:
    """Plans of gpt-oss-120b's drafter with random weights in a recipe: layers that TensorRT makes of them, latency."""
    _random_engine(recipe, engine, SHAPE, layers)
    options = PlanOptions(max_batch_size=max_batch_size, max_seq_len=max_seq_len, max_num_tokens=16)
    begin = time.monotonic()
    manifest = add_plans(engine, options)
    click.echo(f"{layers} layers: both plans in {time.monotonic() - begin:.0f} s")
    context = min(max_seq_len, 2048) - manifest.draft.block_size
    passes(TensorRTExecutor(engine, manifest, CudaLauncher(torch.device("cuda"))), manifest, (1,), (context,))
    problems = [problem for graph in manifest.plans for problem in gemms(engine, manifest, graph)]
    if problems:
        raise SystemExit("expected quantised weights to be multiplied as they are, found " + "; ".join(problems))


@steps.command()
@click.argument("recipe")
@engine_argument
@click.option("--shape", type=click.Choice(list(SIZES)), default=SHAPE, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--batch-sizes", "batches", callback=_numbers, default="1,4,16", show_default=True)
@click.option("--contexts", callback=_numbers, default="512,4096,32768", show_default=True)
@device_option
def torch_pass(
    recipe: str, engine: Path, shape: str, layers: int, batches: Numbers, contexts: Numbers, device: str
) -> None:
    """The pass of a drafter with random weights in torch: one CUDA graph, beside a copy of its bytes."""
    manifest = _random_engine(recipe, engine, shape, layers)
    torch.cuda.CUDAGraph = partial(torch.cuda.CUDAGraph, keep_graph=True)  # type: ignore[assignment]
    begin, executor = time.monotonic(), choose_executor(engine, manifest, device=device, executor="torch")
    measured = passes(executor, manifest, batches, contexts)
    size, rate = (engine / "model.safetensors").stat().st_size, copy_rate(device)
    click.echo(
        f"{layers} layers, {recipe}: {time.monotonic() - begin:.0f} s in all; weights {size / 1e6:.0f} MB,"
        f" {1e6 * size / rate:.0f} us at a copy's {rate / 1e9:.0f} GB/s;"
        f" aim for one behind 512 rows on an H100: {AIMS.get(recipe, 'none')} us"
    )
    if device == "cuda" and isinstance(executor, TorchExecutor):
        click.echo("launches of one block: {}, of the fewest context rows: {}".format(*_launches(executor)))
    rows = (json.dumps([ALGORITHMS.get(recipe, recipe), *key, us]) for key, us in measured.items())
    click.echo(f"as tools/measured_passes.json has them: {', '.join(rows)}")


def passes(
    executor: Executor, manifest: Manifest, batches: Sequence[int], contexts: Sequence[int]
) -> dict[Numbers, int]:
    """Prints times of both graphs' calls, copies of inputs and outputs included; microseconds by context and blocks."""
    spec, rows = manifest.draft, executor.cache_rows(max(batches))
    executor.load()
    each, found = num_pages_for(max(contexts)) if rows is None else 1, dict[Numbers, int]()  # each block has its own
    caches = [_cache(executor, manifest, each * max(batches), rows or TOKENS_PER_PAGE) for _ in "kv"]
    for cache in caches:  # pages of equal numbers, but not of zeros, which take a GPU less power
        cache.copy_(torch.randn(cache.shape[1:], device=executor.device).to(cache.dtype))
    executor.bind(*caches)  # it holds their addresses alone
    for context in contexts:
        for B in batches:
            used = num_pages_for(context) if rows is None else 1
            page_ids = [range(block * each, block * each + used) for block in range(B)]
            inputs = _inputs(executor, manifest, page_ids, context)
            found[context, B] = round(1e6 * seconds_of(partial(executor.draft, inputs)))
        times = (f"{found[context, B]} us for {B}" for B in batches)
        click.echo(f"a pass by its blocks, {context} rows of context: {', '.join(times)}")
    taps, place = torch.randn(spec.block_size, spec.target_hidden_size), torch.arange(spec.block_size)
    seconds = seconds_of(partial(executor.context, taps.to(executor.device), place.to(executor.device)))
    click.echo(f"context of {spec.block_size} rows: {1e6 * seconds:.0f} us")
    return found


def _launches(executor: TorchExecutor) -> list[int]:
    """Kernels, copies and fills of the smallest draft graph and of the smallest context graph."""
    counts, driver = [], ctypes.CDLL(machine.DRIVER)
    for graph in (executor._draft, executor._context):
        assert isinstance(graph, RecordedGraph)
        call, count = graph._calls[0], ctypes.c_size_t()
        assert isinstance(call, partial)
        driver.cuGraphGetNodes(ctypes.c_void_p(call.args[0].raw_cuda_graph()), None, ctypes.byref(count))
        counts.append(count.value)
    return counts


def _random_engine(recipe: str, engine: Path, shape: str, layers: int) -> Manifest:
    """An engine of the shape's drafter with random weights in a recipe."""
    source = _draft_of(engine, "bf16")
    if not source.exists():  # one for all recipes
        written = engine.with_name(f"{engine.name}-begun")
        write_random_draft(written, dialect="gpt_oss", layer_types=["full_attention"] * layers, sizes=SIZES[shape])
        config = json.loads((written / "config.json").read_text()) | {"max_position_embeddings": MAX_CONTEXT}
        (written / "config.json").write_text(json.dumps(config))
        written.rename(source)
    if recipe != "bf16":
        quantize_checkpoint(read_draft(source), load_recipe(recipe), _draft_of(engine, recipe))
    return build(_draft_of(engine, recipe), engine)


def _draft_of(engine: Path, recipe: str) -> Path:
    return engine.with_name("random" if recipe == "bf16" else f"{engine.name}-draft")


def gemms(engine: Path, manifest: Manifest, graph: str) -> list[str]:
    """Prints how often which layer is in a plan, as the engine inspector says; returns Gemms that lost their format."""
    plan, plugin = manifest.plans[graph], manifest.plugin
    trt = tensorrt_api.load_tensorrt(plan.runtime)
    if plan.needs_plugin:
        tensorrt_api.load_plugin(trt, plugin_library(), plugin.name, plugin.version, plugin.namespace)
    runtime = trt.Runtime(tensorrt_api.make_logger(trt))
    inspector = runtime.deserialize_cuda_engine((engine / plan.file).read_bytes()).create_engine_inspector()
    layers = inspected_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    print_table(f"{plan.file}: {len(layers)} layers", ("layers",), [(line,) for line in summary(layers)])
    return unfused(layers, engine / manifest.graphs[graph].file)


@steps.command()
@engine_argument
def start(engine: Path) -> None:
    """Seconds to the first block of a drafter in plans, and the kernels of an earlier start that were there."""
    kept = sorted(file.name for file in engine.glob(f"*{SUFFIX}"))
    manifest, begin = read_manifest(engine), time.perf_counter()
    _first_step(engine, manifest, CudaLauncher(torch.device("cuda")))
    click.echo(f"{time.perf_counter() - begin:.2f} s; kernels kept by an earlier start: {', '.join(kept) or 'none'}")


@steps.command()
@engine_argument
def graphs(engine: Path) -> None:
    """Replayed CUDA graphs give what enqueueing gives, for inputs that came after the capture."""
    launchers = (CudaLauncher(torch.device("cuda")), CurrentStreamLauncher())
    if not torch.equal(*(_first_step(engine, read_manifest(engine), launcher) for launcher in launchers)):
        raise SystemExit("expected the same bits from a graph and from calls that are enqueued, found others")
    click.echo("both graphs were captured, and replayed with other inputs than at their capture")


def _first_step(engine: Path, manifest: Manifest, launcher: CudaLauncher | CurrentStreamLauncher) -> Tensor:
    spec, rng = manifest.draft, torch.Generator().manual_seed(0)
    drafter = Drafter.open(TensorRTExecutor(engine, manifest, launcher), spec, num_slots=2)
    taps = torch.randn(8, spec.target_hidden_size, generator=rng)
    return _step(drafter, (3, 5), taps, torch.randn(2, spec.block_size, spec.hidden_size, generator=rng))


@steps.command()
@engine_argument
def far_cache(engine: Path) -> None:
    """A context cache of more than 2^31 elements: its last slot gives the hidden states of its first one's rows."""
    manifest = read_manifest(engine)
    executor, spec = TensorRTExecutor(engine, manifest, CudaLauncher(torch.device("cuda"))), manifest.draft
    slots = manifest.plans["draft"].profiles[0]["slots"].max
    rows = executor.cache_rows(slots)
    executor.load()
    caches = [_cache(executor, manifest, slots, rows) for _ in "kv"]
    if (elements := caches[0].numel()) <= FAR:
        raise SystemExit(f"expected plans for a cache of more than {FAR} elements, found {elements}")
    context = rows - spec.block_size
    for cache in caches:
        cache[0, :, :context].normal_()
        cache[-1, :, :context] = cache[0, :, :context]
    executor.bind(*caches)
    first, last = (
        executor.draft(_inputs(executor, manifest, [[slot]], context))["hidden"].clone() for slot in (0, slots - 1)
    )
    if first.isnan().any() or not torch.equal(first, last):
        raise SystemExit("expected the hidden states of the first slot's rows from the last one, found others")
    click.echo(f"{elements / FAR:.2f} x 2^31 elements in {slots} slots of {rows} rows: the last slot gives the same")


def _cache(executor: Executor, manifest: Manifest, pages: int, rows: int) -> Tensor:
    spec = manifest.draft
    shape = (pages, spec.num_layers, rows, spec.num_key_value_heads, spec.head_dim)
    return torch.zeros(shape, dtype=executor.cache_dtype, device=executor.device)


def _inputs(executor: Executor, manifest: Manifest, page_ids: Sequence[Sequence[int]], context: int) -> DraftInputs:
    """Equal blocks over `context` rows of each one's pages, at positions that the draft knows."""
    spec, B = manifest.draft, len(page_ids)
    S = spec.block_size
    block = torch.randn(1, S, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = min(context, spec.max_position_embeddings - S) + torch.arange(S)[None]
    values = (block.expand(B, -1, -1), positions.expand(B, -1), torch.tensor(page_ids), torch.tensor([context] * B))
    return DraftInputs(*(value.to(executor.device) for value in values))


if __name__ == "__main__":
    steps()
