# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernel on this machine's GPU, beside torch's attentions and a device-to-device copy.

The kernel does what the node does: it norms and rotates the block, takes slots from the cache and reads FP8 as it is.
Its peers get a head start that is not timed: q and k normed and rotated, context and block in one dense BF16 tensor.
Each way runs from a CUDA graph, and before each run the L2 cache is filled with other data. A row's time is the
median. GB/s counts what has to be read and written once, of the copy both reads and writes; the speed-up is over the
best peer.
Prints tables, asserts nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from tests.gpu.launches import Launch, why_no_launch
from tests.paths import REPOSITORY
from tests.plugins.calls import inputs
from tests.plugins.cases import PERFORMANCE, SHORT, Case
from tests.plugins.kernel.oracle import norm_and_rotate
from tests.plugins.tensors import Tensors, draw

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
COPY_BYTES = 2**30
Attention = Callable[[], object]


def seconds(run: Attention, runs: int) -> float:
    """The median time of `run` as a CUDA graph, with nothing of its inputs in L2."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.zeros(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.float32, device="cuda")  # 4 x L2
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()  # read, not written: L2 would write back up to its size while the clock runs
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def fastest(ways: dict[str, Attention], runs: int) -> tuple[float, str] | None:
    """Time and name of the fastest of those that take these inputs."""
    times = []
    for name, run in ways.items():
        try:
            times.append((seconds(run, runs), name))
        except RuntimeError as error:  # "No available kernel", or torch.compile's lowering error
            torch.cuda.synchronize()
            click.echo(f"{name}: {str(error).splitlines()[0]}", err=True)
    return min(times, default=None)


def dense(case: Case, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, N, S, D], and k and v of context and block [B, G, C + S, D], in the block's dtype."""
    B, S, D = case.B, case.S, case.D
    queries, keys = (
        torch.stack([norm_and_rotate(x[b].view(S, -1, D), norm, tensors.rope[b]) for b in range(B)]).to(case.dtype)
        for x, norm in ((tensors.q, tensors.q_norm), (tensors.k, tensors.k_norm))
    )
    whole = []
    for cache, scale, block in (
        (tensors.k_cache, case.k_scale, keys),
        (tensors.v_cache, case.v_scale, tensors.v.view(B, S, -1, D)),
    ):
        context = cache[:B, case.layer].to(case.dtype)
        context *= scale
        whole.append(torch.cat([context.transpose(1, 2), block.transpose(1, 2)], dim=2))
    return queries.transpose(1, 2).contiguous(), *whole


def sdpa_ways(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Attention]:
    def way(backend: SDPBackend) -> Attention:
        def run() -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, scale=case.D**-0.5, enable_gqa=True)

        return run

    return {backend.name.removesuffix("_ATTENTION").lower(): way(backend) for backend in BACKENDS}


def flex_ways(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Attention]:
    torch.compiler.reset()  # a new shape is compiled anew, not counted as one recompilation too many
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"flex": lambda: compiled(q, k, v, scale=case.D**-0.5, enable_gqa=True)}


def moved_bytes(case: Case, tensors: Tensors) -> int:
    """What a call has to read and write: all of its tensors once, and the output."""
    return sum(tensor.nbytes for tensor in inputs(tensors)) + tensors.q.nbytes


def fits(case: Case) -> bool:
    """With the peers' dense copies, and the FP32 values that one request's rows are drawn as."""
    rows = 2 * sum(case.context_lengths) * case.G * case.D
    needed = rows * (case.cache_dtype.itemsize + 2 * case.dtype.itemsize) + 8 * rows // case.B
    return needed < torch.cuda.mem_get_info()[0]


def row(case: Case, copy: float, runs: int) -> list[str]:
    context = case.context_lengths[0]
    name = f"{case.B} x {context}"
    if not fits(case):
        return [name, "does not fit", *[""] * 7]
    tensors = draw(case, "cuda")
    launch = Launch(case, tensors)
    launch.run()
    ours = seconds(launch.start, runs)
    moved = moved_bytes(case, tensors)
    peers = dense(case, tensors)
    sdpa = fastest(sdpa_ways(case, *peers), runs)
    flex = fastest(flex_ways(case, *peers), runs)
    found = [peer for peer in (sdpa, flex) if peer is not None]
    return [
        name,
        f"{moved / 1e6:.1f}",
        f"{ours * 1e6:.1f}",
        f"{moved / ours / 1e9:.0f}",
        f"{moved / ours / copy:.0%}",
        *((f"{sdpa[0] * 1e6:.1f}", sdpa[1]) if sdpa else ("none", "")),
        f"{flex[0] * 1e6:.1f}" if flex else "none",
        f"{min(found)[0] / ours:.2f}" if found else "",
    ]


def title(case: Case) -> str:
    return f"{case.N}/{case.G} heads of {case.D}, block {case.S}, {SHORT[case.cache_dtype].upper()} cache"


def copy_speed(runs: int) -> float:
    """Bytes a second, read and written."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source), runs)


def describe_machine() -> None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    head = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    click.echo(f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    click.echo(f"commit {commit}, {' '.join(sys.argv)}")


@click.command()
@click.option("--runs", default=50, show_default=True, help="Timed runs of each way.")
@click.option("--max-rows", default=64 * 131072, show_default=True, help="Leave out what reads more context rows.")
def main(runs: int, max_rows: int) -> None:
    """Measure the kernel, torch's attentions and a copy over shapes, batches, contexts and cache formats."""
    if reason := why_no_launch():
        raise click.ClickException(reason)
    describe_machine()
    copy = copy_speed(runs)
    nothing = torch.zeros(1, device="cuda")
    click.echo(f"device-to-device copy {copy / 1e9:.0f} GB/s; empty launch {seconds(nothing.zero_, runs) * 1e6:.1f} us")
    columns = ["B x context", "MB", "ours, us", "GB/s", "of copy", "SDPA, us", "by", "Flex, us", "speed-up"]
    tables: dict[str, list[Case]] = {}
    for case in PERFORMANCE:
        if sum(case.context_lengths) <= max_rows:
            tables.setdefault(title(case), []).append(case)
    for text, cases in tables.items():
        print_table(text, columns, [row(case, copy, runs) for case in cases])


if __name__ == "__main__":
    main()
