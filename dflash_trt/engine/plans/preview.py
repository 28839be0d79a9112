# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans before they are built: their memory on one GPU, and how trtexec would build them.

trtexec's flags are those of samples/common/sampleOptions.cpp in TensorRT 10.15 and 11.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.plan import PlanOptions, num_workspaces, profiles, shapes
from dflash_trt.engine.plans.tensorrt_api import installed_library, plugin_library
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.engine.shards import shard_spec, shards
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, Graph, Port, graph_signatures, num_pages_for
from dflash_trt.errors import MissingDependencyError
from dflash_trt.files.command import command_line

BYTES = {"BFLOAT16": 2, "FLOAT8E4M3FN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4}
HARDWARE_LEVELS = {"same_compute_capability": "sameComputeCapability", "ampere_plus": "ampere+"}


def trtexec_commands(
    engine: Path, spec: PartialDraftSpec, quantization: Quantization, num_ranks: int, options: PlanOptions,
    timing_cache: TimingCache | None = None,
) -> list[str]:  # fmt: skip
    """Commands for the plans that `add_plans` would build, where `num_ranks` ranks share the draft: one line a plan.

    The engine need not be there yet, nor TensorRT or a GPU. None for TensorRT-RTX, which has no trtexec.
    """
    if options.runtime == "tensorrt_rtx":
        return []
    parts = [engine / shard.directory for shard in shards(num_ranks)] or [engine]
    graphs = graph_signatures(shard_spec(spec, num_ranks), quantization, is_shard=num_ranks > 1)
    return [
        command_line(_words(part / name, graph, options, timing_cache))
        for part in parts
        for name, graph in graphs.items()
    ]


def _words(stem: Path, graph: Graph, options: PlanOptions, timing_cache: TimingCache | None) -> Iterator[str]:
    """The words of a command that builds `stem`.plan as `build_plan` does."""
    yield from ("trtexec", f"--onnx={stem.with_name(graph.file)}", f"--saveEngine={stem}.plan")
    yield from ("--stronglyTyped", "--skipInference", "--profilingVerbosity=detailed", "--maxAuxStreams=0")
    yield f"--memPoolSize=workspace:{options.workspace_bytes // 2**20}M"
    if options.hardware_compatibility != "none":
        yield f"--hardwareCompatibilityLevel={HARDWARE_LEVELS[options.hardware_compatibility]}"
    if options.version_compatible:
        yield "--versionCompatible"
    if graph.reads_context:
        try:
            library = plugin_library()
        except MissingDependencyError:
            library = installed_library()  # where it will be
        yield f"--dynamicPlugins={library}"  # registers it, which the parser needs
        if options.version_compatible:
            yield f"--setPluginsToSerialize={library}"  # only embeds it
    if timing_cache is not None:
        yield f"--timingCacheFile={timing_cache.file}"
        if timing_cache.reproducible:
            yield "--errorOnTimingCacheMiss"
    for index, profile in enumerate(profiles(stem.name, options)):
        yield f"--profile={index}"
        for flag, bound in (("minShapes", 0), ("optShapes", 1), ("maxShapes", 2)):
            sizes = {name: "x".join(map(str, bounds[bound])) for name, bounds in shapes(graph, profile).items()}
            yield f"--{flag}=" + ",".join(f"{name}:{size}" for name, size in sizes.items())


class DrafterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a drafter with TensorRT on one GPU: exact for our allocations, a bound for TensorRT's."""

    weight_bytes: int
    """Files that the graphs point into; TensorRT may repack them."""
    cache_bytes: int
    """Context rows of all slots."""
    activation_bytes: int
    """Inputs and outputs of the largest call."""
    workspace_bytes: int
    """Limit of all plans together."""


def drafter_memory(manifest: Manifest, options: PlanOptions, directory: Path) -> DrafterMemory:
    """Memory of the engine, or of the shard, at `directory`, with plans that serve `options`."""
    pages_of_a_slot = num_pages_for(options.max_seq_len)
    B = options.max_batch_size
    sizes = {"B": B, "T": options.max_num_tokens, "slots": B, "pages": pages_of_a_slot}
    rows = {"T": B * pages_of_a_slot * TOKENS_PER_PAGE}
    cache = sum(BYTES[port.dtype] * prod(port.sizes(rows)) for port in manifest.graphs["context"].outputs)
    activations = sum(BYTES[port.dtype] * prod(port.sizes(sizes)) for port in _tensors(manifest))
    weights = [directory / name for name in manifest.sha256 if name.endswith(".safetensors")]
    return DrafterMemory(
        weight_bytes=sum(file.stat().st_size for file in weights),
        cache_bytes=cache,
        activation_bytes=activations,
        workspace_bytes=num_workspaces(manifest.draft) * options.workspace_bytes,
    )


def _tensors(manifest: Manifest) -> Iterator[Port]:
    """Inputs and outputs, each once: a shard's segments share them, and its streams have two buffers each."""
    context = manifest.graphs["context"]
    yield from (*context.inputs, *context.outputs)
    draft = (graph for name, graph in manifest.graphs.items() if name != "context")
    ports = (port for graph in draft for port in (*graph.inputs, *graph.outputs))
    yield from {_buffer(port.name): port for port in ports}.values()


def _buffer(name: str) -> tuple[str, int]:
    stream, _, segment = name.partition(".")
    return stream, int(segment or 0) % 2
