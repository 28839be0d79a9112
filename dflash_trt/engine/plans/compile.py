# SPDX-License-Identifier: Apache-2.0
"""One plan: network, profiles and builder configuration become a file's bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dflash_trt.engine.plans.machine import sm_name
from dflash_trt.engine.plans.plan import PlanOptions, Profile, shapes
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, make_logger
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.engine.signatures import Graph
from dflash_trt.errors import BuildError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dflash_trt.engine.plans.int4_weights import UnpairedRows


HARDWARE_LEVELS = {"none": "NONE", "same_compute_capability": "SAME_COMPUTE_CAPABILITY", "ampere_plus": "AMPERE_PLUS"}


def build_plan(
    trt: Any,
    directory: Path,
    graph: Graph,
    graph_profiles: Sequence[Profile],
    options: PlanOptions,
    *,
    compute_capabilities: Sequence[str],
    plugin: Path | None,
    timing_cache: TimingCache | None,
    output: BinaryIO,
) -> None:
    """Writes the serialised, strongly typed plan of one graph to `output`; a version-compatible plan embeds `plugin`.

    TensorRT builds for this machine's GPU, TensorRT-RTX for `compute_capabilities`. Raises BuildError if the build
    fails, OSError where `output` cannot be written.
    """
    from dflash_trt.engine.plans.int4_weights import UnpairedRows

    logger = make_logger(trt)
    builder = trt.Builder(logger)
    title = f"{RUNTIMES[options.runtime].title} {trt.__version__}"
    unpaired = UnpairedRows.read(directory / graph.file)  # kept alive here, because the network points into it
    network = _network(trt, builder, logger, directory / graph.file, title, unpaired)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.runtime == "tensorrt_rtx":
        _choose_gpus(trt, config, compute_capabilities)
    else:
        config.hardware_compatibility_level = getattr(
            trt.HardwareCompatibilityLevel, HARDWARE_LEVELS[options.hardware_compatibility]
        )
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the engine inspector; costs no time
    config.max_aux_streams = 0  # one stream: a CUDA graph of a plan is then a chain without joins
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if plugin is not None:
            config.plugins_to_serialize = [str(plugin)]
    for profile in graph_profiles:
        if config.add_optimization_profile(_optimization_profile(builder, graph, profile)) < 0:
            raise _refused_profile(graph, profile)
    if timing_cache is not None:
        timing_cache.attach(trt, config)
    with progress_monitor(trt, f"building {graph.file}") as monitor:
        config.progress_monitor = monitor
        writer = _make_writer(trt, output)
        is_built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.error is not None:
        raise writer.error
    if not is_built:
        raise BuildError(
            f"{graph.file}: {title} built no plan; its messages are above",
            hint="build another --recipe, give more --workspace-gib, or try another TensorRT version",
        )
    if timing_cache is not None:
        timing_cache.save(config)


def _make_writer(trt: Any, output: BinaryIO) -> Any:
    """An IStreamWriter to `output`: a plan that is serialised in memory takes as much of it as all weights."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)  # pybind11 asks for it by name
            self.error: OSError | KeyboardInterrupt | None = None

        def write(self, data: bytes) -> int:
            """-1 ends the build: an exception must not raise through TensorRT's C++ frames."""
            try:
                return output.write(data)
            except (OSError, KeyboardInterrupt) as error:
                self.error = error
                return -1

    return Writer()


def _choose_gpus(trt: Any, config: Any, compute_capabilities: Sequence[str]) -> None:
    # Never without a list: findings/tensorrt_rtx_builds_fp4_for_gpus_without_it.sh
    config.num_compute_capabilities = len(compute_capabilities)
    for index, capability in enumerate(compute_capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, sm_name(capability).upper()), index)
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # stream capture requires it


def _optimization_profile(builder: Any, graph: Graph, profile: Profile) -> Any:
    optimization = builder.create_optimization_profile()
    try:
        for name, (smallest, best, largest) in shapes(graph, profile).items():
            optimization.set_shape(name, smallest, best, largest)
    except RuntimeError as problem:  # the bindings' way to say that setDimensions returned false
        raise _refused_profile(graph, profile) from problem
    return optimization


def _refused_profile(graph: Graph, profile: Profile) -> BuildError:
    sizes = ", ".join(f"{axis} {size.min} to {size.max}" for axis, size in profile.items())
    return BuildError(
        f"{graph.file}: expected a profile that TensorRT takes, found one it refuses (messages above): {sizes}",
        hint="build for another --max-batch-size, --max-seq-len or --max-num-tokens",
    )


def _network(trt: Any, builder: Any, logger: Any, file: Path, title: str, unpaired: UnpairedRows) -> Any:
    """The strongly typed network of `file`; BuildError names the nodes that the parser refuses."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not unpaired.parse(parser, file):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        nodes = (f"{e.node_name()} ({e.node_operator()}): " if e.node_name() else "" for e in errors)
        raise BuildError(
            f"{file}: expected a graph that {title} reads, found:"
            + "".join(f"\n  {node}{error.desc()}" for node, error in zip(nodes, errors, strict=True)),
            hint="choose another --recipe for the layer named above, or another TensorRT version",
        )
    return network


@contextmanager
def progress_monitor(trt: Any, title: str) -> Iterator[Any]:
    """An IProgressMonitor that draws a bar for each phase on stderr; KeyboardInterrupt where the user did."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        progress.add_task(title, total=None)
        monitor = make_monitor(trt, progress)
        yield monitor
    if monitor.is_stopped:
        raise KeyboardInterrupt


def make_monitor(trt: Any, progress: Progress) -> Any:
    """A class of its own for each module, because TensorRT must know the base class."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # pybind11 asks for it by name
            self._tasks: dict[str, TaskID] = {}
            self.is_stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            indent = "  " if parent_phase is None else "    "
            self._tasks[phase_name] = progress.add_task(f"{indent}{phase_name}", total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build: an interrupt must not raise through TensorRT's C++ frames."""
            try:
                progress.update(self._tasks[phase_name], completed=step + 1)
            except KeyboardInterrupt:
                self.is_stopped = True
            return not self.is_stopped

        def phase_finish(self, phase_name: str) -> None:
            progress.remove_task(self._tasks.pop(phase_name))

    return Monitor()
