# SPDX-License-Identifier: Apache-2.0
"""Steps of gpu_report.py that are no command of dflash-trt: each a process of its own."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.cli.output import print_table
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.gpus import known_gpu, known_gpus
from dflash_trt.deploy.resolve import resolve
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.jit_cache import SUFFIX
from dflash_trt.engine.plans.launcher import CudaLauncher, CurrentStreamLauncher, Launcher
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_api import plugin_library
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.inputs import system
from dflash_trt.observe.estimate.step import StepLoad, StepModel
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.drafter import Drafter, choose_executor
from tests.engine.plans.plan_layers import inspected_layers, summary, unfused
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft

# Activations are BF16 under TensorRT and FP32 here: 8 bits of mantissa, over a few layers.
TOLERANCE = 0.05
STEPS = ((3, 5), (1, 2), (60, 30))  # context rows of both slots before a block; the last are more than a plan takes
TARGET = "openai/gpt-oss-120b"
# The shape of its drafter: 785 million parameters with all of its eight layers.
SIZES = DraftSizes(
    hidden=2880, intermediate=7680, num_heads=64, num_kv_heads=8, head_dim=64, num_taps=5, num_target_layers=36,
    block_size=10, vocab_size=201088,
)  # fmt: skip
FAR = 2**31
RUNS, ENOUGH_SECONDS = 50, 5.0
"""Calls to measure, or as many as take so long."""


def own_stream() -> Launcher:
    """A stream of its own, on which every call of a plan is a CUDA graph."""
    return CudaLauncher(torch.device("cuda"))


def current_stream() -> Launcher:
    """Torch's stream, on which calls are queued one by one."""
    return CurrentStreamLauncher()


@click.group()
def steps() -> None:
    """Steps of gpu_report.py."""


@steps.command()
def torch_cuda() -> None:
    """A CUDA build of torch that this driver runs; exits with 1 otherwise."""
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no GPU")
    click.echo(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")


executor_option = click.option("--executor", type=click.Choice(["tensorrt", "torch"]), default="tensorrt")
device_option = click.option("--device", default="cuda")


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def parity(engine: Path) -> None:
    """Run equal taps and blocks through plans and ONNX Runtime; exit with 1 where they differ by more."""
    manifest = read_manifest(engine)
    ours = choose_executor(engine, manifest, device="cuda", executor="tensorrt")
    theirs = choose_executor(engine, manifest)
    errors = list(differences(manifest, ours, theirs))
    rows = [(str(step), f"{100 * error:.2f} %") for step, error in enumerate(errors, start=1)]
    print_table("hidden states, plans less ONNX Runtime, of their root mean square", ("step", "difference"), rows)
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
    return drafter.draft((0, 1), block.to(device)).float().cpu()


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("target")
@executor_option
@device_option
def decode(engine: Path, target: str, executor: str, device: str) -> None:
    """64 greedy tokens with the drafter and without drafts; exits with 1 where they differ or no draft is accepted."""
    from dflash_trt import LLM, SamplingParams

    found = {}
    for length in (None, 0):
        with LLM(engine, target, device=device, executor=executor) as llm:
            found[length] = llm.generate("def main(", SamplingParams(max_tokens=64, draft_length=length))[0]
    acceptance = found[None].acceptance
    tau = acceptance.tau if acceptance else None
    click.echo(f"tau {tau}, {len(found[None].token_ids)} tokens: {found[None].text!r}")
    if found[None].token_ids != found[0].token_ids:
        raise SystemExit(f"expected the tokens of plain decoding, {found[0].text!r}")
    if not tau or tau < 1.5:
        raise SystemExit("expected a tau of at least 1.5: the pair accepts more than that on a CPU")


@steps.command()
@click.argument("recipe")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--layers", default=2, show_default=True)
@click.option("--max-batch-size", default=1, show_default=True)
@click.option("--max-seq-len", default=2048, show_default=True)
def drafter(recipe: str, engine: Path, layers: int, max_batch_size: int, max_seq_len: int) -> None:
    """Plans of gpt-oss-120b's drafter with random weights in a recipe: layers that TensorRT makes of them, latency."""
    _random_engine(recipe, engine, layers)
    draft = engine.with_name(f"random-{layers}-layers" if recipe == "bf16" else f"{engine.name}-draft")
    options = PlanOptions(max_batch_size=max_batch_size, max_seq_len=max_seq_len, max_num_tokens=16)
    begin = time.monotonic()
    manifest = add_plans(engine, options)
    click.echo(f"{layers} layers: both plans in {time.monotonic() - begin:.0f} s")
    latencies(engine, manifest, draft)
    problems = [problem for graph in manifest.plans for problem in gemms(engine, manifest, graph)]
    if problems:
        raise SystemExit("expected quantised weights to be multiplied as they are, found " + "; ".join(problems))


@steps.command()
@click.argument("recipe")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--layers", default=8, show_default=True)
@click.option("--batch-sizes", default="1,4,16", show_default=True)
@click.option("--contexts", default="512,4096,32768", show_default=True)
@device_option
def torch_pass(recipe: str, engine: Path, layers: int, batch_sizes: str, contexts: str, device: str) -> None:
    """The pass of gpt-oss-120b's drafter with random weights in torch: one CUDA graph, beside a copy of its bytes."""
    manifest = _random_engine(recipe, engine, layers)
    executor, spec = choose_executor(engine, manifest, device=device, executor="torch"), manifest.draft
    batches, lengths = ([int(number) for number in numbers.split(",")] for numbers in (batch_sizes, contexts))
    executor.cache_rows(max(batches))
    begin = time.monotonic()
    executor.load()
    shape = (-(-max(lengths) // TOKENS_PER_PAGE), spec.num_layers, TOKENS_PER_PAGE, *_heads(manifest))
    caches = [torch.zeros(shape, dtype=executor.cache_dtype, device=executor.device) for _ in "kv"]
    executor.bind(*caches)
    click.echo(f"{layers} layers, {recipe}: opened in {time.monotonic() - begin:.0f} s")
    rows = []
    for context in lengths:
        pages = torch.arange(-(-context // TOKENS_PER_PAGE))  # every block reads the same pages
        cells = []
        for B in batches:
            positions = context + torch.arange(spec.block_size).expand(B, -1)
            block = torch.randn(B, spec.block_size, spec.hidden_size)
            values = (block, positions, pages.expand(B, -1), torch.full((B,), context))
            inputs = DraftInputs(*(value.to(executor.device) for value in values))
            cells.append(f"{1e6 * _seconds(partial(executor.draft, inputs)):.0f}")
        rows.append((str(context), *cells))
    print_table("microseconds of a call, inputs and outputs copied", ("context", *map(str, batches)), rows)
    taps, place = torch.zeros(10, spec.target_hidden_size), torch.arange(10)
    seconds = _seconds(partial(executor.context, taps.to(executor.device), place.to(executor.device)))
    weights = (engine / "model.safetensors").stat().st_size
    click.echo(
        f"context of 10 rows: {1e6 * seconds:.0f} us; weights {weights / 1e6:.0f} MB: {_copy_time(weights, device)}"
    )


def _copy_time(num_bytes: int, device: str) -> str:
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    return f"{1e6 * _seconds(source.clone):.0f} us to copy half of them, which reads and writes as many bytes"


def _heads(manifest: Manifest) -> tuple[int, int]:
    return manifest.draft.num_key_value_heads, manifest.draft.head_dim


def _random_engine(recipe: str, engine: Path, layers: int) -> Manifest:
    """An engine of gpt-oss-120b's drafter with random weights in a recipe."""

    source = draft = engine.with_name(f"random-{layers}-layers")
    if not source.exists():  # one for all recipes
        written = engine.with_name(f"{engine.name}-begun")
        write_random_draft(written, dialect="gpt_oss", layer_types=["full_attention"] * layers, sizes=SIZES)
        written.rename(source)
    if recipe != "bf16":
        draft = engine.with_name(f"{engine.name}-draft")
        quantize_checkpoint(read_draft(source), load_recipe(recipe), draft)
    return build(draft, engine)


def latencies(engine: Path, manifest: Manifest, draft: Path) -> None:
    """Both plans' calls, with copies of inputs and outputs, beside what `estimate` says of the drafter."""
    executor, spec = TensorRTExecutor(engine, manifest, own_stream()), manifest.draft
    rows = executor.cache_rows(2)
    executor.load()
    caches = [_cache(executor, manifest, 2, min(rows, 2048)) for _ in "kv"]
    executor.bind(*caches)
    context = caches[0].shape[2] - spec.block_size
    taps = torch.zeros(spec.block_size, spec.target_hidden_size, device=executor.device)
    positions = torch.arange(spec.block_size, device=executor.device)
    inputs = _inputs(executor, manifest, slot=0, context=context)
    found = _seconds(lambda: executor.context(taps, positions)) + _seconds(lambda: executor.draft(inputs))
    click.echo(f"context and block, {context} rows of context: {1e6 * found:.0f} us; {_predicted(draft, context)}")


def _predicted(draft: Path, context: int) -> str:
    name = re.sub("[^a-z0-9]", "", machine.gpu().name.lower())
    gpu = next((gpu for gpu in known_gpus() if gpu in name), None)
    if gpu is None:
        return "estimate does not know this GPU"
    file = DeploymentFile(
        description="", target=TARGET, draft=str(draft), gpus=f"{gpu}x1", purpose="latency", mode="engine"
    )
    model = StepModel(system(resolve(file, "drafter"), "trtllm"), rates(known_gpu(gpu), "trtllm"))
    length = read_draft(draft).spec.num_draft_tokens
    terms = model.price("dflash", StepLoad(batch=1, num_draft_tokens=length, context=context)).terms
    return f"estimate says {1e6 * sum(term.seconds for term in terms if term.part == 'drafter'):.0f} us"


def _seconds(call: Callable[[], object]) -> float:
    def synchronize() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    call()
    begin = synchronize()
    done = 0
    while done < RUNS and time.perf_counter() - begin < ENOUGH_SECONDS:
        call()
        done += 1
    return (synchronize() - begin) / done


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
@click.argument("engine", type=click.Path(path_type=Path))
def start(engine: Path) -> None:
    """Seconds to the first block of a drafter in plans, and the kernels of an earlier start that were there."""
    kept = sorted(file.name for file in engine.glob(f"*{SUFFIX}"))
    manifest, begin = read_manifest(engine), time.perf_counter()
    drafter = Drafter.open(TensorRTExecutor(engine, manifest, own_stream()), manifest.draft, num_slots=2)
    taps = torch.zeros(8, manifest.draft.target_hidden_size)
    _step(drafter, (3, 5), taps, torch.zeros(2, manifest.draft.block_size, manifest.draft.hidden_size))
    click.echo(f"{time.perf_counter() - begin:.2f} s; kernels kept by an earlier start: {', '.join(kept) or 'none'}")


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def far_cache(engine: Path) -> None:
    """A context cache of more than 2^31 elements: its last slot gives the hidden states of its first one's rows."""
    manifest = read_manifest(engine)
    executor, spec = TensorRTExecutor(engine, manifest, own_stream()), manifest.draft
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
        executor.draft(_inputs(executor, manifest, slot=slot, context=context)).clone() for slot in (0, slots - 1)
    )
    if first.isnan().any() or not torch.equal(first, last):
        raise SystemExit("expected the hidden states of the first slot's rows from the last one, found others")
    click.echo(f"{elements / FAR:.2f} x 2^31 elements in {slots} slots of {rows} rows: the last slot gives the same")


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def capture(engine: Path) -> None:
    """Replayed CUDA graphs give what enqueueing gives, for inputs that came after the capture."""
    manifest, spec = read_manifest(engine), read_manifest(engine).draft
    found = []
    for launcher in (own_stream(), current_stream()):
        drafter = Drafter.open(TensorRTExecutor(engine, manifest, launcher), spec, num_slots=2)
        rng = torch.Generator().manual_seed(0)
        taps = torch.randn(8, spec.target_hidden_size, generator=rng)
        block = torch.randn(2, spec.block_size, spec.hidden_size, generator=rng)
        found.append(_step(drafter, (3, 5), taps, block))
    if not torch.equal(*found):
        raise SystemExit("expected the same bits from a graph and from calls that are enqueued, found others")
    click.echo("both graphs were captured, and replayed with other inputs than at their capture")


def _cache(executor: Executor, manifest: Manifest, slots: int, rows: int) -> Tensor:
    spec = manifest.draft
    shape = (slots, spec.num_layers, rows, spec.num_key_value_heads, spec.head_dim)
    return torch.zeros(shape, dtype=executor.cache_dtype, device=executor.device)


def _inputs(executor: Executor, manifest: Manifest, *, slot: int, context: int) -> DraftInputs:
    """One request's block over `context` rows of `slot`, the same block for every slot, at positions that it knows."""
    spec = manifest.draft
    S = spec.block_size
    block = torch.randn(1, S, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = min(context, spec.max_position_embeddings - S) + torch.arange(S)[None]
    values = (block, positions, torch.tensor([[slot]]), torch.tensor([context]))
    return DraftInputs(*(value.to(executor.device) for value in values))


if __name__ == "__main__":
    steps()
