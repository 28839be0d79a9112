# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`: a draft, quantised and given a head of its own on request, becomes an engine directory."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, for_pool
from dflash_trt.checkpoint.draft_spec import D2T, DraftSpec
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG
from dflash_trt.checkpoint.safetensors_file import StoredTensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, write_safetensors
from dflash_trt.checkpoint.source import checkpoint_label, is_local, label_text
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import SINGLE, read_weights, weight_files
from dflash_trt.engine.graph.context_graph import context_graph
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION, draft_graph, draft_segments
from dflash_trt.engine.graph.onnx_builder import PLUGIN_DOMAIN
from dflash_trt.engine.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Plugin,
    Source,
    TargetSource,
    sha256,
)
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.proposal_head import HeadChoice, with_head
from dflash_trt.engine.signatures import Graph, Shard, graph_signatures, not_shared, shard_spec, shards
from dflash_trt.errors import BuildError
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, check_replaceable, new_directory
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.convert import quantised
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.unwritten_draft import unchanged

CONTEXT_WEIGHTS = "context_kv.safetensors"
MAX_MANIFEST_BYTES = 2**26
# Ranks share a draft by tensor parallelism (Megatron-LM, arXiv 1909.08053): rows of q, k, v, gate and up, columns of o
# and down. Their biases, fc, norms and scales are whole on each, so that codes stay as they are.
LAYER = r"layers\.\d+\."
BY_ROWS = re.compile(
    LAYER + r"((self_attn\.[qkvg]|mlp\.gate|mlp\.up)_proj\.(weight|weight_scale|bias)|self_attn\.sinks)"
)
BY_COLUMNS = re.compile(LAYER + r"(self_attn\.o|mlp\.down)_proj\.(weight|weight_scale)")
WEIGHT_SUFFIXES = ("weight", "weight_scale", "bias")


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `dflash-trt build` makes of a draft and a target that fit."""

    draft: DraftCheckpoint
    draft_name: str
    """What the user called the draft."""
    target: TargetCheckpoint
    target_name: str | None = None
    """What the user called the target; None leaves it out of the manifest."""
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
    """What TensorRT plans, built now or later, are to serve."""


def build_engine(options: BuildOptions) -> Manifest:
    """Writes the engine directory `options.output` for ONNX Runtime and returns its manifest.

    With several ranks, also the shard of each in a directory below it. The same inputs give the same bytes. Raises
    BuildError when `output` cannot be written or ranks cannot share the draft, CheckpointError for a weight that is NaN
    or infinite, and as `quantised` and `with_head` do.
    """
    draft, output, num_ranks = options.draft, options.output, options.num_ranks
    check_output(output, force=options.force)
    new = unchanged(draft) if options.recipe is None else quantised(draft, options.recipe, ranges=options.ranges)
    if options.head is not None:
        new = with_head(new, options.target, options.head, options.head_tokens)
    if problem := not_shared(new.spec, num_ranks, new.quantization.algorithms()):
        hint = "build without --tp: every rank then runs the whole drafter"
        raise BuildError(f"{draft.directory}: {problem}", hint=hint)
    source = describe_source(draft, options.draft_name, options.recipe)
    target_source = None
    if options.target_name is not None:
        target_source = describe_target(options.target, options.target_name)

    def finish(part: DraftCheckpoint, directory: Path, shard: Shard | None = None) -> Manifest:
        """Writes the graphs and the manifest beside the tensors, and returns the manifest."""
        graphs = _write_graphs(part, directory, shard)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            tool_version=__version__,
            source=source,
            draft=part.spec,
            target=options.target.spec,
            graphs=graphs,
            plugin=Plugin(name=ATTENTION, version=PLUGIN_VERSION, namespace=PLUGIN_DOMAIN),
            quantization=part.quantization,
            sha256={file.name: sha256(file) for file in sorted(directory.iterdir())},
            target_source=target_source,
            plan_options=options.plan_options,
            shard=shard,
            num_ranks=1 if shard else num_ranks,
        )
        (directory / MANIFEST).write_bytes(manifest.encode())
        return manifest

    config, layout = for_pool(new.config, new.spec.num_layers), _in_stacks(new.spec, new.layout)
    with new_directory(output, ENGINE, force=options.force) as directory:
        msgspec.structs.replace(new, config=config, layout=layout).write(directory)
        # The graphs point into the file just written, so the tensors are those of its header.
        written = msgspec.structs.replace(
            draft, directory=directory, spec=new.spec, quantization=new.quantization, weights=read_weights(directory)
        )
        manifest = finish(written, directory)
        for shard in shards(num_ranks):
            place = directory / shard.directory
            place.mkdir()
            finish(write_shard(written, shard, place), place, shard)
    return manifest


def _write_graphs(draft: DraftCheckpoint, directory: Path, shard: Shard | None) -> dict[str, Graph]:
    """The graphs of a draft whose tensors lie in `directory`."""
    is_shard = shard is not None
    graphs = graph_signatures(draft.spec, draft.quantization, is_shard=is_shard)
    _write_graph(context_graph(_with_context_stack(draft)), directory / graphs["context"].file)
    for name, model in (draft_segments(draft) if is_shard else {"draft": draft_graph(draft)}).items():
        _write_graph(model, directory / graphs[name].file)
    return graphs


class _Marker(msgspec.Struct):
    """Keys that distinguish an engine's manifest.json, of any version, from those of web pages and packages."""

    schema_version: int
    tool_version: str
    graphs: dict[str, object]
    sha256: dict[str, str]


def is_engine(directory: Path) -> bool:
    """Whether a directory is one that `build` wrote, whole or damaged."""
    file = directory / MANIFEST
    try:
        return bool(msgspec.json.decode(read_bytes(file, BuildError, limit=MAX_MANIFEST_BYTES), type=_Marker))
    except (BuildError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


ENGINE = OutputKind(name="an engine directory", recognizes=is_engine)


def check_output(output: Path, *, force: bool) -> None:
    """Raises BuildError where no engine can be written; onnx takes only paths that are UTF-8."""
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise BuildError(
            f"{str(output)!r}: expected a path in UTF-8, found other bytes", hint="choose another -o DIR"
        ) from None
    check_replaceable(output, ENGINE, force=force)


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


def describe_source(draft: DraftCheckpoint, name: str, recipe: Recipe | None = None) -> Source:
    """What the manifest says of the checkpoint that the user called `name`, and of the recipe that quantised it."""
    files = [draft.config.file, draft.directory / HF_QUANT_CONFIG, *weight_files(draft.weights)]
    hashes = {file.name: sha256(file) for file in files if file.is_file()}
    return Source(name=checkpoint_label(name), recipe=None if recipe is None else recipe.name, sha256=hashes)


def describe_target(target: TargetCheckpoint, name: str) -> TargetSource:
    """What the manifest says of the target, which the user called `name`."""
    revision = None if is_local(name) else target.directory.name  # of a snapshot in the hub's cache
    return TargetSource(
        name=label_text(name), revision=revision, config_sha256=sha256(target.directory / "config.json")
    )


def write_shard(whole: DraftCheckpoint, shard: Shard, directory: Path) -> DraftCheckpoint:
    """A rank's part of the draft of an engine directory, its tensors written to `directory` in the same order."""
    tensors = read_tensors(whole.directory / SINGLE)
    layout = {name: (tensor.dtype, shard_shape(tensor, shard)) for name, tensor in tensors.items()}
    with SafetensorsWriter(directory / SINGLE, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, _part(tensor, shard))
    return msgspec.structs.replace(
        whole, directory=directory, spec=shard_spec(whole.spec, shard.num_ranks), weights=read_weights(directory)
    )


def shard_shape(tensor: StoredTensor, shard: Shard) -> tuple[int, ...]:
    """Shape of a rank's part; scalars of a shared layer are whole."""
    if not tensor.shape:
        return ()
    rows, *columns = tensor.shape
    if BY_ROWS.fullmatch(tensor.name):
        return (rows // shard.num_ranks, *columns)
    if BY_COLUMNS.fullmatch(tensor.name) and columns:
        return (rows, columns[0] // shard.num_ranks)
    return tensor.shape


def _part(tensor: StoredTensor, shard: Shard) -> NDArray[np.uint8]:
    """Bytes of a rank's part."""
    raw: NDArray[np.uint8] = np.memmap(
        tensor.file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,)
    )
    shape = shard_shape(tensor, shard)
    if shape == tensor.shape:
        return raw
    if shape[0] == tensor.shape[0]:
        raw = raw.reshape(shape[0], shard.num_ranks, -1)[:, shard.rank]
    else:
        raw = raw.reshape(shard.num_ranks, -1)[shard.rank]
    return np.ascontiguousarray(raw)
