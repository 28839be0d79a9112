# SPDX-License-Identifier: Apache-2.0
"""The same build as a command line of trtexec (flags: samples/common/sampleOptions.cpp of TensorRT 10.15 and 11.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.checkpoint.draft_shares import shard_spec
from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.engine.plans.plan import PlanOptions, Profile
from dflash_trt.engine.plans.plugin_library import installed_library, plugin_library
from dflash_trt.engine.plans.profiles import profiles, shapes
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.engine.signatures import Graph, graph_signatures, shards
from dflash_trt.errors import MissingDependencyError
from dflash_trt.files.command import command_line

HARDWARE_LEVELS = {"same_compute_capability": "sameComputeCapability", "ampere_plus": "ampere+"}


def trtexec_commands(
    engine: Path, spec: PartialDraftSpec, num_ranks: int, options: PlanOptions, timing_cache: TimingCache | None = None
) -> list[str]:
    """What `add_plans` would build of the engine of a draft that `num_ranks` ranks share, one shell line a plan.

    The engine need not be there yet, nor TensorRT or a GPU.
    """
    parts = [engine / shard.directory for shard in shards(num_ranks)] or [engine]
    # An FP8 cache has the same axes.
    graphs = graph_signatures(shard_spec(spec, num_ranks), fp8_cache=False, is_shard=num_ranks > 1)
    return [
        command_line(_words(part / name, graph, profiles(name, options), options, timing_cache))
        for part in parts
        for name, graph in graphs.items()
    ]


def _words(
    stem: Path,
    graph: Graph,
    graph_profiles: tuple[Profile, ...],
    options: PlanOptions,
    timing_cache: TimingCache | None,
) -> Iterator[str]:
    """The words that build `stem`.plan as `build_plan` does."""
    yield from ("trtexec", f"--onnx={stem.with_name(graph.file)}", f"--saveEngine={stem}.plan")
    yield from ("--stronglyTyped", "--skipInference", "--profilingVerbosity=detailed", "--maxAuxStreams=0")
    yield f"--memPoolSize=workspace:{options.workspace_bytes // 2**20}M"
    if options.hardware_compatibility != "none":
        yield f"--hardwareCompatibilityLevel={HARDWARE_LEVELS[options.hardware_compatibility]}"
    if options.version_compatible:
        yield "--versionCompatible"
    if graph.reads_context:
        yield f"--dynamicPlugins={_library_path()}"  # registers it, which the parser needs
        if options.version_compatible:
            yield f"--setPluginsToSerialize={_library_path()}"  # only embeds it
    if timing_cache is not None:
        yield f"--timingCacheFile={timing_cache.file}"
        if timing_cache.reproducible:
            yield "--errorOnTimingCacheMiss"
    for index, profile in enumerate(graph_profiles):
        yield f"--profile={index}"
        for flag, bound in (("minShapes", 0), ("optShapes", 1), ("maxShapes", 2)):
            sizes = {name: "x".join(map(str, bounds[bound])) for name, bounds in shapes(graph, profile).items()}
            yield f"--{flag}=" + ",".join(f"{name}:{size}" for name, size in sizes.items())


def _library_path() -> Path:
    try:
        return plugin_library()
    except MissingDependencyError:
        return installed_library()  # where it will be
