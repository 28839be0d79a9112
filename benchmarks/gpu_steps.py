# SPDX-License-Identifier: Apache-2.0
"""Steps of gpu_report.py that are no command of dflash-trt: each a process of its own."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.cli.output import print_table
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.gpus import known_gpus
from dflash_trt.deploy.resolve import resolve
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.launcher import CudaLauncher, CurrentStreamLauncher, Launcher
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_api import plugin_library
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.inputs import system
from dflash_trt.observe.estimate.step import StepLoad, StepModel
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
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
RUNS = 50


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


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def parity(engine: Path) -> None:
    """Run equal taps and blocks through TensorRT and ONNX Runtime; exit with 1 where they differ by more."""
    manifest = read_manifest(engine)
    tensorrt = TensorRTExecutor(engine, manifest, own_stream())
    errors = list(differences(manifest, tensorrt, OnnxExecutor(engine, manifest)))
    rows = [(str(step), f"{100 * error:.2f} %") for step, error in enumerate(errors, start=1)]
    print_table("hidden states, TensorRT less ONNX Runtime, of their root mean square", ("step", "difference"), rows)
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
@click.argument("device", default="cuda")
def decode(engine: Path, target: str, device: str) -> None:
    """64 greedy tokens with the plans and without drafts; exits with 1 where they differ or no draft is accepted."""
    from dflash_trt import LLM, SamplingParams

    found = {}
    for length in (None, 0):
        with LLM(engine, target, device=device) as llm:
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
    draft = engine.with_name(f"{engine.name}-bf16")
    write_random_draft(draft, dialect="gpt_oss", layer_types=["full_attention"] * layers, sizes=SIZES)
    if recipe != "bf16":
        source, draft = draft, engine.with_name(f"{engine.name}-draft")
        quantize_checkpoint(read_draft(source), load_recipe(recipe), draft)
    build(draft, engine)
    options = PlanOptions(max_batch_size=max_batch_size, max_seq_len=max_seq_len, max_num_tokens=16)
    begin = time.monotonic()
    manifest = add_plans(engine, options)
    click.echo(f"{layers} layers: both plans in {time.monotonic() - begin:.0f} s")
    latencies(engine, manifest, draft)
    problems = [problem for graph in manifest.plans for problem in gemms(engine, manifest, graph)]
    if problems:
        raise SystemExit("expected quantised weights to be multiplied as they are, found " + "; ".join(problems))


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
    model = StepModel(system(resolve(file, "drafter"), "trtllm"), rates(gpu, "trtllm"))
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
    for _ in range(RUNS):
        call()
    return (synchronize() - begin) / RUNS


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
    """A replayed CUDA graph of both plans gives what enqueueing them gives, for inputs that came after the capture."""
    manifest, spec = read_manifest(engine), read_manifest(engine).draft
    found = []
    for launcher in (own_stream(), current_stream()):
        executor = TensorRTExecutor(engine, manifest, launcher)
        drafter = Drafter.open(executor, spec, num_slots=2)
        rng = torch.Generator().manual_seed(0)
        taps = torch.randn(8, spec.target_hidden_size, generator=rng)
        block = torch.randn(2, spec.block_size, spec.hidden_size, generator=rng)
        found.append(_step(drafter, (3, 5), taps, block))
    if not torch.equal(*found):
        raise SystemExit("expected the same bits from a graph and from calls that are enqueued, found others")
    click.echo("both plans were captured, and replayed with other inputs than at their capture")


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
