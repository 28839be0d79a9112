# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernel on this machine's GPU beside the best attentions there are, all reading the same cache.

A way's time is that of a layer: one CUDA graph holds a call for each of a drafter's eight layers, whose caches lie in
one tensor, and before each run the L2 cache is filled with other data; the median of the runs is taken. The kernel does
what the node does: it norms and rotates the block and takes slots from the cache. Its peers get a head start that is
not timed (benchmarks/attention_peers.py, which also says which versions the calls were written for). None reads another
format than the case's: who has no FP8 cache is left out there, not given one of twice the bytes.

GB/s counts what has to be read and written once; "of copy" is the share of what a device-to-device copy reads and
writes, "of peak" of the data sheet. "off by" is the largest difference from the kernel's output over the largest
output: a peer that computes something else shows there.
Prints tables, asserts nothing. With --dry-run it prints what it would measure, for which it needs no GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attention_cases import Inputs, cases, context_bytes, make_inputs, memory_bytes, moved_bytes
from benchmarks.attention_peers import PEERS, Call, Peer
from dflash_trt.cli.doctor_machine import gpu_findings
from dflash_trt.cli.output import print_table
from tests.gpu.launches import Launch, why_no_launch
from tests.paths import REPOSITORY
from tests.plugins.cases import Case, ahead_fits
from tools.gpus import GPUS

COPY_BYTES = 2**30
OURS = "dflash-trt"
SHORT_ROWS = 4096
"""Up to which the kernel of short contexts is measured; where its border lies is to be seen."""
PEAKS = {"H100 80GB HBM3": 3.35e12, "H100 PCIe": 2.0e12} | {gpu.name: gpu.terabytes * 1e12 for gpu in GPUS}
COLUMNS = ["B x context", "MB", "way", "us a layer", "GB/s", "of copy", "of peak", "ours is faster by", "off by"]


def graph_seconds(run: Callable[[], object], runs: int) -> float:
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
    return seconds(graph.replay, runs)


def seconds(run: Callable[[], object], runs: int) -> float:
    """The median time of `run`, with nothing of its inputs in L2."""
    flush = torch.zeros(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.float32, device="cuda")  # 4 x L2
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()  # read, not written: L2 would write back up to its size while the clock runs
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def each_layer(calls: Sequence[Call], runs: int) -> float:
    """Seconds of a layer where a graph holds all of them."""
    return graph_seconds(lambda: [call() for call in calls], runs) / len(calls)


def our_calls(inputs: Inputs, kernel: str = "best") -> list[Call]:
    """One for each layer, on one workspace, as TensorRT gives it."""
    calls: list[Call] = []
    workspace = None
    for layer in range(inputs.case.L):
        launch = Launch(replace(inputs.case, layer=layer), inputs.tensors, workspace, kernel)
        workspace = launch.workspace

        def call(launch: Launch = launch) -> torch.Tensor:
            launch.start()
            return launch.out

        calls.append(call)
    return calls


def other_kernels(case: Case) -> Iterator[str]:
    """Kernels that the GPU has beside the one that it takes."""
    if torch.cuda.get_device_capability()[0] == 9:
        yield "mma"
        if ahead_fits(case):
            yield "ahead"
    if case.D in (64, 128) and max(case.context_lengths) <= SHORT_ROWS:
        yield "short"


def difference(output: torch.Tensor, ours: torch.Tensor) -> float:
    return ((output.reshape(-1).float() - ours.reshape(-1).float()).abs().max() / ours.float().abs().max()).item()


def measure(case: Case, peers: Sequence[Peer], copy: float, peak: float | None, runs: int) -> Iterator[list[str]]:
    """A row for each way, ours first."""
    size = moved_bytes(case)
    begin = [case.name, f"{size / 1e6:.1f}"]
    torch.cuda.empty_cache()  # what the case before had
    if memory_bytes(case) > torch.cuda.mem_get_info()[0]:
        yield [*begin, "does not fit", *[""] * 6]
        return
    inputs = make_inputs(case, "cuda")
    calls = our_calls(inputs)
    ours = each_layer(calls, runs)
    output = calls[0]().clone()

    def row(name: str, time: float, by: str, off: str) -> list[str]:
        rate = size / time
        share = f"{rate / peak:.0%}" if peak else ""
        return [*begin, name, f"{time * 1e6:.1f}", f"{rate / 1e9:.0f}", f"{rate / copy:.0%}", share, by, off]

    yield row(OURS, ours, "", "")
    for kernel in other_kernels(case):
        calls = our_calls(inputs, kernel)
        off = difference(calls[0](), output)
        time = each_layer(calls, runs)
        yield row(f"{OURS}, {kernel}", time, f"{time / ours:.2f}", f"{off:.3f}")
    for peer in peers:
        if peer.refusal(case, torch.cuda.get_device_capability()):
            continue
        try:
            calls = peer.prepare(inputs)
            off = difference(calls[0](), output)
            time = each_layer(calls, runs)
        except Exception as error:  # whatever another library says to inputs that it does not take
            torch.cuda.synchronize()
            click.echo(f"{case.name}, {peer.name}: {(str(error) or repr(error)).splitlines()[0]}", err=True)
            continue
        yield row(peer.name, time, f"{time / ours:.2f}", f"{off:.3f}")


def describe_peers(peers: Sequence[Peer], table: Sequence[Case], capability: tuple[int, int] | None) -> None:
    """Which peers some of these cases are without, and why."""
    for peer in peers:
        reasons = {reason: case.name for case in table if (reason := peer.refusal(case, capability))}
        for reason, name in reasons.items():
            every = all(peer.refusal(case, capability) == reason for case in table)
            click.echo(f"  without {peer.name}{'' if every else f' in {name} and the like'}: {reason}")


def dry_run(peers: Sequence[Peer], tables: dict[str, list[Case]]) -> None:
    """What would be measured: bytes of a layer, what a GPU has to hold, and the time that its memory alone takes."""
    bounds = [gpu for gpu in GPUS if gpu.name in ("H200", "B300")]
    names = [f"us at {gpu.name}'s {gpu.terabytes} TB/s" for gpu in bounds]
    columns = ["B x context", "MB of cache", "MB in all", "GB on the GPU", *names]
    for heading, table in tables.items():
        print_table(
            heading,
            columns,
            [
                [
                    case.name,
                    f"{context_bytes(case) / 1e6:.1f}",
                    f"{moved_bytes(case) / 1e6:.1f}",
                    f"{memory_bytes(case) / 1e9:.1f}",
                    *(f"{moved_bytes(case) / gpu.terabytes / 1e6:.1f}" for gpu in bounds),
                ]
                for case in table
            ],
        )
        describe_peers(peers, table, None)


def copy_speed(runs: int) -> float:
    """Bytes a second, read and written; not in a graph, where a copy takes half as long again (H200)."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source), runs)


def peak_speed(name: str) -> float | None:
    """Bytes a second of the memory of a GPU that torch calls `name`; None for one that is not listed."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def describe_machine() -> None:
    driver = next((finding.found for finding in gpu_findings() if finding.name == "NVIDIA driver"), "not known")
    click.echo(f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    head = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    with suppress(OSError):  # no git, whose caller names the commit
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        click.echo(f"commit {commit or 'not known'}, {' '.join(sys.argv)}")


def chosen(max_rows: int, only: str) -> dict[str, list[Case]]:
    tables = {}
    for heading, table in cases().items():
        if only in heading:
            tables[heading] = [case for case in table if sum(case.context_lengths) <= max_rows]
    return tables


@click.command()
@click.option("--runs", default=50, show_default=True, help="Timed runs of each way.")
@click.option("--max-rows", default=64 * 131072, show_default=True, help="Leave out what reads more context rows.")
@click.option("--only", default="", help="Tables whose title has this in it.")
@click.option("--peer", "names", multiple=True, help="Peers whose name has this in it; all without this option.")
@click.option("--dry-run", "dry", is_flag=True, help="Print cases, bytes and peers; needs no GPU.")
def main(runs: int, max_rows: int, only: str, names: tuple[str, ...], dry: bool) -> None:
    """Measure the kernel, its peers and a copy over drafters, batches, contexts, ragged ones too, and cache formats."""
    tables = chosen(max_rows, only)
    peers = [peer for peer in PEERS if not names or any(name in peer.name for name in names)]
    if dry:
        return dry_run(peers, tables)
    if reason := why_no_launch():
        raise click.ClickException(f"{reason}; --dry-run prints what would be measured")
    describe_machine()
    copy, peak = copy_speed(runs), peak_speed(torch.cuda.get_device_name())
    nothing = torch.zeros(1, device="cuda")
    click.echo(
        f"device-to-device copy {copy / 1e9:.0f} GB/s; empty launch {graph_seconds(nothing.zero_, runs) * 1e6:.1f} us"
    )
    for heading, table in tables.items():
        print_table(heading, COLUMNS, [row for case in table for row in measure(case, peers, copy, peak, runs)])
        describe_peers(peers, table, torch.cuda.get_device_capability())
    return None


if __name__ == "__main__":
    main()
