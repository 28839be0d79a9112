# SPDX-License-Identifier: Apache-2.0
"""Times the plugin's kernels on this machine's GPU and the best other attention kernels, all reading the same cache.

A way's time is that of a layer: one CUDA graph holds a call for each of a drafter's eight layers, whose caches lie in
one tensor. The graphs of all ways run in turn, each with the L2 cache filled with other data, and the median of a way's
runs is taken. The kernel does what the node does: it norms and rotates the block and takes slots from the cache. Its
peers get a head start that is not timed (benchmarks/attention_peers.py, which also says which versions the calls were
written for). All read the case's format: peers without an FP8 cache are left out there, not given one of twice the
bytes.

--library times another build of the plugin in the same run, such as an older commit's, as TensorRT would call it:

    git archive --prefix=old/ c40195f plugins | tar x cmake -S old/plugins -B old/build -DDFLASH_CUDA=ON
-DDFLASH_CUDA_ARCHITECTURES=90a && cmake --build old/build -j python benchmarks/bench_kv_injection_attention.py
--library c40195f=old/build/libdflash_trt_plugins.so

MB is what has to be read and written once; "of copy" is the share of what a device-to-device copy reads and writes. A
line after each table has the largest difference of each way from the kernel's output, over the largest output: a peer
that computes something else shows there. The last lines say from or up to which context the kernels that are not used
by default are faster. Prints Markdown, a row as soon as it is known, and asserts nothing. With --dry-run it prints what
it would measure, for which it needs no GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attention_cases import Inputs, cases, context_bytes, make_inputs, memory_bytes, moved_bytes
from benchmarks.attention_peers import PEERS, Call, Peer
from dflash_trt import _C
from dflash_trt.cli.doctor_machine import gpu_findings
from dflash_trt.cli.output import print_table
from tests.gpu.launches import EXPERIMENTAL_BUILD, Launch, PluginLaunch, why_no_launch
from tests.paths import REPOSITORY
from tests.plugins.cases import Case, ahead_fits
from tools.gpus import GPUS

COPY_BYTES = 2**30
KERNELS = ("mma", "short", "ahead")
"""Kernels that may be measured in addition to the default one."""
SHORT_ROWS = 4096
"""Context up to which the kernel of short contexts is measured; where its border lies is to be seen."""
NOISE = 1.01
"""A way is not slower than another if it takes at most this many times its time."""


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """Replays `run` as a CUDA graph; it initialises in three runs before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_seconds(ways: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median time of each way, all in turn, with nothing of their inputs in L2."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, run in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _other_data().sum()  # read, not written: L2 would write back up to its size while the clock runs
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@cache
def _other_data() -> torch.Tensor:
    """Four times what L2 holds."""
    return torch.zeros(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.float32, device="cuda")


def our_calls(inputs: Inputs, make: Callable[..., Launch]) -> list[Call]:
    """One for each layer, on one workspace, as TensorRT gives it."""
    calls: list[Call] = []
    workspace = None
    for layer in range(inputs.case.L):
        launch = make(replace(inputs.case, layer=layer), inputs.tensors, workspace)
        workspace = launch.workspace

        def call(launch: Launch = launch) -> torch.Tensor:
            launch.start()
            return launch.out

        calls.append(call)
    return calls


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Ways that are measured in addition to the default kernel."""

    kernels: Sequence[str]
    libraries: Mapping[str, Path]
    peers: Sequence[Peer]
    runs: int

    def of(self, case: Case, capability: tuple[int, int]) -> dict[str, Callable[[Inputs], list[Call]]]:
        """The calls of each, by name, of those that take the case; the kernel of today is "ours"."""
        is_hopper = capability == (9, 0)
        fits = {
            "mma": is_hopper,  # elsewhere it is ours
            "short": case.D in (64, 128) and max(case.context_lengths) <= SHORT_ROWS,
            "ahead": is_hopper and ahead_fits(case),
        }
        makers: dict[str, Callable[..., Launch]] = {"ours": Launch}
        makers |= {name: partial(PluginLaunch, path) for name, path in self.libraries.items()}
        makers |= {name: partial(Launch, kernel=name) for name in self.kernels if fits[name]}
        ways = {name: partial(our_calls, make=make) for name, make in makers.items()}
        return ways | {peer.name: peer.prepare for peer in self.peers if not peer.refusal(case, capability)}


@dataclass(kw_only=True)
class Found:
    """Results of one table, by way."""

    offs: dict[str, tuple[float, str]] = field(default_factory=dict)
    """The largest difference, and its case."""
    ratios: dict[str, list[tuple[int, float, str]]] = field(default_factory=dict)
    """Context, time over ours, and the case, where all contexts are equal."""

    def add(self, case: Case, seconds: Mapping[str, float], offs: Mapping[str, float]) -> None:
        for name, off in offs.items():
            self.offs[name] = max(self.offs.get(name, (-1.0, "")), (off, case.name), key=_by_size)
            if len(set(case.context_lengths)) == 1:
                ratio = seconds[name] / seconds["ours"]
                self.ratios.setdefault(name, []).append((case.context_lengths[0], ratio, case.name))


def _by_size(off: tuple[float, str]) -> float:
    return off[0] if off[0] == off[0] else float("inf")  # a NaN is larger than any


def difference(output: torch.Tensor, ours: torch.Tensor) -> float:
    """The largest, over the largest of ours."""
    return ((output.reshape(-1).float() - ours.reshape(-1).float()).abs().max() / ours.float().abs().max()).item()


def measure(case: Case, ways: Ways, found: Found) -> dict[str, float]:
    """Seconds of a layer by way; what another library refuses, or a kernel, is printed and left out."""
    inputs = make_inputs(case, "cuda")
    graphs, offs, output = {}, {}, torch.empty(0)
    for name, prepare in ways.of(case, torch.cuda.get_device_capability()).items():
        try:
            calls = prepare(inputs)
            if name == "ours":
                output = calls[0]().clone()
            else:
                offs[name] = difference(calls[0](), output)
            graphs[name] = graph_of(partial(_each, calls))
        except Exception as error:  # any error of another library about unsupported inputs
            torch.cuda.synchronize()  # where the GPU itself failed all ends here
            if name == "ours":
                raise
            click.echo(f"{case.name}, {name}: {(str(error) or repr(error)).splitlines()[0]}", err=True)
            offs.pop(name, None)
    seconds = {name: time / case.L for name, time in median_seconds(graphs, ways.runs).items()}
    found.add(case, seconds, offs)
    return seconds


def _each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def print_measured(heading: str, table: Sequence[Case], ways: Ways, copy: float) -> Found:
    """The table, row by row: a run that is cut off keeps those it has."""
    found, capability = Found(), torch.cuda.get_device_capability()
    names = list(dict.fromkeys(name for case in table for name in ways.of(case, capability)))
    click.echo(f"\n{heading}, microseconds a layer\n")
    click.echo(f"| B x context | MB | of copy | {' | '.join(names)} |\n{'|---' * (3 + len(names))}|")
    for case in table:
        torch.cuda.empty_cache()  # frees the previous case's memory
        size = moved_bytes(case)
        cells = [case.name, f"{size / 1e6:.1f}"]
        if memory_bytes(case) > torch.cuda.mem_get_info()[0]:
            cells.append("does not fit")
        else:
            seconds = measure(case, ways, found)
            cells.append(f"{size / seconds['ours'] / copy:.0%}")
            cells += [f"{1e6 * seconds[name]:.1f}" if name in seconds else "–" for name in names]
        click.echo(f"| {' | '.join(cells)} |")
    offs = ", ".join(f"{name} {off:.3f} ({case})" for name, (off, case) in found.offs.items())
    click.echo(f"\nlargest difference from ours, of the largest output: {offs or 'nothing beside it'}")
    return found


def proposals(found: Mapping[str, Found]) -> Iterator[str]:
    """Contexts at which the kernels that are not used by default are faster in every table."""
    short = [row for table in found.values() for row in table.ratios.get("short", ())]
    if short:
        rows = short_rows(short)
        limit = [f"{name} takes {ratio:.2f} times as long" for at, ratio, name in short if at > rows and ratio > NOISE]
        yield f"short contexts: not slower up to {rows} rows" + (f"; after that {limit[0]}" if limit else "")
    for heading, table in found.items():
        if ahead := table.ratios.get("ahead"):
            least = ahead_rows(ahead)
            where = "slower at the longest" if least is None else f"not slower from {least} rows on"
            ratios = [ratio for _, ratio, _ in ahead]
            yield f"ahead, {heading}: {min(ratios):.2f} to {max(ratios):.2f} times ours, {where}"


def short_rows(found: Iterable[tuple[int, float, str]]) -> int:
    """The longest context up to which no call was slower; 0 where one of the shortest was."""
    rows = sorted(found)
    slower = min((context for context, ratio, _ in rows if ratio > NOISE), default=1 << 30)
    return max((context for context, *_ in rows if context < slower), default=0)


def ahead_rows(found: Iterable[tuple[int, float, str]]) -> int | None:
    """The shortest context from which on no call was slower; None where one of the longest was."""
    rows = sorted(found)
    slower = max((context for context, ratio, _ in rows if ratio > NOISE), default=-1)
    return min((context for context, *_ in rows if context > slower), default=None)


def describe_peers(peers: Sequence[Peer], table: Sequence[Case], capability: tuple[int, int] | None) -> None:
    """Peers that are missing in some of these cases, with the reason."""
    for peer in peers:
        reasons = {reason: case.name for case in table if (reason := peer.refusal(case, capability))}
        for reason, name in reasons.items():
            every = all(peer.refusal(case, capability) == reason for case in table)
            click.echo(f"  without {peer.name}{'' if every else f' in {name} and the like'}: {reason}")


def dry_run(peers: Sequence[Peer], tables: dict[str, list[Case]]) -> None:
    """The cases of a run: bytes of a layer, memory needed on the GPU, and the time at its memory bandwidth."""
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
    return 2 * COPY_BYTES / median_seconds({"copy": lambda: target.copy_(source)}, runs)["copy"]


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


def _libraries(_context: click.Context, _option: click.Parameter, given: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not Path(path).is_file():
            raise click.BadParameter(f"expected NAME=PATH of a plugin library, found {text!r}")
        found[name] = Path(path)
    return found


@click.command()
@click.option("--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Timed runs of each way.")
@click.option("--max-rows", default=64 * 131072, show_default=True, help="Leave out what reads more context rows.")
@click.option("--only", default="", help="Tables whose title has this in it.")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(KERNELS), default=KERNELS, show_default=True)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    metavar="NAME=PATH",
    callback=_libraries,
    help="Another build of the plugin library.",
)
@click.option("--peer", "names", multiple=True, help="Peers whose name has this in it; all without this option.")
@click.option("--dry-run", "dry", is_flag=True, help="Print cases, bytes and peers; needs no GPU.")
def main(
    runs: int, max_rows: int, only: str, kernels: tuple[str, ...], libraries: dict[str, Path], names: tuple[str, ...],
    dry: bool,
) -> None:  # fmt: skip
    """Measure the kernel, its peers and a copy over drafters, batches, contexts, ragged ones too, and cache formats."""
    tables = chosen(max_rows, only)
    peers = [peer for peer in PEERS if not names or any(name in peer.name for name in names)]
    if dry:
        return dry_run(peers, tables)
    if reason := why_no_launch():
        raise click.ClickException(f"{reason}; --dry-run prints what would be measured")
    if missing := [name for name in kernels if name not in _C.kv_injection_attention_kernels()]:
        click.echo(
            f"without {' and '.join(missing)}: no GPU has run them, so they are compiled by {EXPERIMENTAL_BUILD}"
        )
        kernels = tuple(name for name in kernels if name not in missing)
    describe_machine()
    copy, nothing = copy_speed(runs), torch.zeros(1, device="cuda")
    empty = median_seconds({"empty": graph_of(nothing.zero_)}, runs)["empty"]
    click.echo(f"device-to-device copy {copy / 1e9:.0f} GB/s; empty launch {1e6 * empty:.1f} us; median of {runs} runs")
    ways, found = Ways(kernels=kernels, libraries=libraries, peers=peers, runs=runs), dict[str, Found]()
    for heading, table in tables.items():
        found[heading] = print_measured(heading, table, ways, copy)
        describe_peers(peers, table, torch.cuda.get_device_capability())
    for line in proposals(found):
        click.echo(line)
    return None


if __name__ == "__main__":
    main()
