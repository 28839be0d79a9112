# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`: a draft, quantised and given a head of its own on request, becomes an engine directory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, for_pool
from dflash_trt.checkpoint.draft_spec import D2T, DraftSpec
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG
from dflash_trt.checkpoint.safetensors_file import read_tensors
from dflash_trt.checkpoint.safetensors_writer import Layout, write_safetensors
from dflash_trt.checkpoint.source import checkpoint_label, is_local, label_text
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import read_weights, weight_files
from dflash_trt.engine.graph.context_graph import context_graph
from dflash_trt.engine.graph.correlator_graph import correlator_graph
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION, draft_graph, draft_segments
from dflash_trt.engine.graph.onnx_builder import PLUGIN_DOMAIN
from dflash_trt.engine.manifest import (
    ENGINE,
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Plugin,
    Source,
    TargetSource,
    path_from,
    sha256,
)
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.proposal_head import HeadChoice, with_head
from dflash_trt.engine.shard_weights import write_shard_weights
from dflash_trt.engine.shards import Shard, not_shared, shards
from dflash_trt.engine.signatures import CORRELATOR, Graph, graph_signatures
from dflash_trt.errors import BuildError
from dflash_trt.files.write import check_replaceable, new_directory
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.convert import quantised
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.unwritten_draft import UnwrittenDraft, unchanged

CONTEXT_WEIGHTS = "context_kv.safetensors"
WEIGHT_SUFFIXES = ("weight", "weight_scale", "bias")


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `dflash-trt build` for a draft and a target that fit."""

    draft: DraftCheckpoint
    draft_name: str
    """Name by which the user gave the draft."""
    target: TargetCheckpoint
    target_name: str | None = None
    """Name by which the user gave the target; None leaves it out of the manifest."""
    output: Path
    force: bool = False
    """Whether to replace an engine at `output`."""
    recipe: Recipe | None = None
    """How the draft is quantised; None takes it as it is."""
    ranges: Ranges | None = None
    """Measured ranges of activations; None takes bounds from the weights."""
    head: HeadChoice | None = None
    """The draft's own head; None proposes by the target's."""
    head_tokens: NDArray[np.int64] | None = None
    """Tokens that a trimmed head keeps, by rising id."""
    num_ranks: int = 1
    """Ranks that share the drafter."""
    plan_options: PlanOptions | None = None
    """Sizes for TensorRT plans, built now or later."""


def build_engine(options: BuildOptions) -> Manifest:
    """Writes the engine directory `options.output` for ONNX Runtime and returns its manifest.

    With several ranks, also the shard of each in a directory below it. The same inputs give the same bytes. Raises
    BuildError when `output` cannot be written or ranks cannot share the draft, CheckpointError for a weight that is NaN
    or infinite, and as `quantised` and `with_head` do.
    """
    _check_output(options.output, force=options.force)
    new = _prepared(options)
    with new_directory(options.output, ENGINE, force=options.force) as directory:
        written = _write_draft(new, directory)
        graphs = _write_graphs(written, directory)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            tool_version=__version__,
            source=describe_source(options.draft, options.draft_name, options.recipe),
            draft=written.spec,
            target=options.target.spec,
            graphs=graphs,
            plugin=Plugin(name=ATTENTION, version=PLUGIN_VERSION, namespace=PLUGIN_DOMAIN),
            quantization=written.quantization,
            sha256=_hashes(directory),
            target_source=_describe_target(options.target, options.target_name, options.output),
            plan_options=options.plan_options,
            num_ranks=options.num_ranks,
        )
        (directory / MANIFEST).write_bytes(manifest.encode())
        for shard in shards(options.num_ranks):
            _write_shard(written, shard, directory / shard.directory, manifest)
    return manifest


def _check_output(output: Path, *, force: bool) -> None:
    """Raises BuildError where no engine can be written; onnx takes only paths that are UTF-8."""
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise BuildError(f"the path {str(output)!r} is not UTF-8", hint="choose another -o DIR") from None
    check_replaceable(output, ENGINE, force=force)


def describe_source(draft: DraftCheckpoint, name: str, recipe: Recipe | None = None) -> Source:
    """Provenance of the checkpoint that the user called `name`, and the recipe that quantised it."""
    files = [draft.config.file, draft.directory / HF_QUANT_CONFIG, *weight_files(draft.weights)]
    hashes = {file.name: sha256(file) for file in files if file.is_file()}
    return Source(name=checkpoint_label(name), recipe=None if recipe is None else recipe.name, sha256=hashes)


def _describe_target(target: TargetCheckpoint, name: str | None, output: Path) -> TargetSource | None:
    """Provenance of the target that the user called `name`, for an engine in `output`; None leaves it out."""
    if name is None:
        return None
    config_sha256 = sha256(target.directory / "config.json")
    if is_local(name):
        return TargetSource(name=label_text(path_from(output, name)), revision=None, config_sha256=config_sha256)
    revision = target.directory.name  # the hub's cache names a snapshot by its revision
    return TargetSource(name=label_text(name), revision=revision, config_sha256=config_sha256)


def _prepared(options: BuildOptions) -> UnwrittenDraft:
    """The draft as the engine will hold it: quantised, and with a head of its own, where that is asked for."""
    draft = options.draft
    new = unchanged(draft) if options.recipe is None else quantised(draft, options.recipe, ranges=options.ranges)
    if options.head is not None:
        new = with_head(new, options.target, options.head, options.head_tokens)
    if problem := not_shared(new.spec, options.num_ranks, new.quantization.algorithms()):
        hint = "build without --tp: every rank then runs the whole drafter"
        raise BuildError(f"{draft.directory}: {problem}", hint=hint)
    return new


def _write_draft(new: UnwrittenDraft, directory: Path) -> DraftCheckpoint:
    """The draft with its tensors in `directory`; the graphs point into the file just written."""
    config, layout = for_pool(new.config, new.spec.num_layers), _in_stacks(new.spec, new.layout)
    msgspec.structs.replace(new, config=config, layout=layout).write(directory)
    return msgspec.structs.replace(
        new.origin, directory=directory, spec=new.spec, quantization=new.quantization, weights=read_weights(directory)
    )


def _write_shard(written: DraftCheckpoint, shard: Shard, directory: Path, whole: Manifest) -> None:
    """Writes a rank's part of the engine that `whole` describes."""
    directory.mkdir()
    part = write_shard_weights(written, shard, directory)
    graphs = _write_graphs(part, directory, shard)
    manifest = msgspec.structs.replace(
        whole, draft=part.spec, graphs=graphs, sha256=_hashes(directory), shard=shard, num_ranks=1
    )
    (directory / MANIFEST).write_bytes(manifest.encode())


def _hashes(directory: Path) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(directory.iterdir())}


def _write_graphs(draft: DraftCheckpoint, directory: Path, shard: Shard | None = None) -> dict[str, Graph]:
    """The graphs of a draft whose tensors lie in `directory`."""
    is_shard = shard is not None
    graphs = graph_signatures(draft.spec, draft.quantization, is_shard=is_shard)
    _write_graph(context_graph(_with_context_stack(draft)), directory / graphs["context"].file)
    for name, model in (draft_segments(draft) if is_shard else {"draft": draft_graph(draft)}).items():
        _write_graph(model, directory / graphs[name].file)
    if CORRELATOR in graphs:
        _write_graph(correlator_graph(draft), directory / graphs[CORRELATOR].file)
    return graphs


def _in_stacks(spec: DraftSpec, layout: Layout) -> Layout:
    """`layout` in file order: what one GEMM multiplies lies side by side, the rest follows by name."""
    stacked = [f"{module}.{suffix}" for stack in spec.stacks() for suffix in WEIGHT_SUFFIXES for module in stack]
    first = [name for name in (D2T, *stacked) if name in layout]  # d2t is aligned to its 8 bytes only there
    return {name: layout[name] for name in [*first, *sorted(layout.keys() - set(first))]}


def _with_context_stack(draft: DraftCheckpoint) -> DraftCheckpoint:
    """`draft` with all layers' quantised K and V projections side by side, in a file of their own.

    Packed codes cannot be joined in the graph, as dense ones are. Where their scales differ, or each layer norms its
    rows, there is no common GEMM, and no such file.
    """
    modules = draft.spec.context_modules()
    is_common = not draft.spec.context_input_layernorm and draft.scaled_alike(modules)
    if modules[0] not in draft.quantization.modules or not is_common:
        return draft
    names = [f"{module}.{suffix}" for suffix in ("weight", "weight_scale") for module in modules]
    file = draft.directory / CONTEXT_WEIGHTS
    write_safetensors(file, [draft.weights[name] for name in names])
    return msgspec.structs.replace(draft, weights=draft.weights | read_tensors(file))


def _write_graph(model: onnx.ModelProto, file: Path) -> None:
    file.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(file))
