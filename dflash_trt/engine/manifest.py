# SPDX-License-Identifier: Apache-2.0
"""manifest.json: contents of an engine directory, its sources, and the target and plugin that it needs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_trt import __version__
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.engine.plans.plan import Plan, PlanOptions
from dflash_trt.engine.shards import Shard, shards
from dflash_trt.engine.signatures import Graph, graph_signatures
from dflash_trt.errors import EngineError, cut, shown
from dflash_trt.files.json_file import SchemaVersion, read_json
from dflash_trt.files.read import is_file_name, read_bytes
from dflash_trt.files.write import OutputKind

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**26
# 1: draft.onnx had a dynamic block size; 2: q, k and v reached its attention nodes apart; 3: it read dense caches;
# 4: context.onnx had two outputs, k and v; 5: draft.onnx read addresses without checksums
SCHEMA_VERSION = 6


NumRanks = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Plugin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TensorRT plugin that the graphs name."""

    name: str
    version: str
    namespace: str


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that the engine was built from."""

    name: str
    """Repository id or directory name, never a path of the building machine."""
    recipe: str | None
    """The recipe that `build` quantised it with; None where it was built as it is."""
    sha256: dict[str, str]
    """Hashes of the checkpoint's files, by file name."""


class TargetSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The target checkpoint that the engine was built for: where commands look for it without --target."""

    name: str
    """Repository id, or a directory: its absolute path, or its path from the engine directory (`target_path`)."""
    revision: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")] | None
    """Commit of the repository; None for a directory."""
    config_sha256: str


def path_from(engine: Path, target: str) -> str:
    """The directory `target` as the manifest of `engine` names it: relative to the engine unless given absolutely."""
    place = Path(target).expanduser()
    return target if place.is_absolute() else os.path.relpath(place.absolute(), engine.resolve())


def target_path(engine: Path, source: TargetSource) -> str:
    """Repository id of an engine's target, or the path of its directory, which may not exist."""
    if source.revision is not None or source.name.startswith(("/", "~")):
        return source.name
    real = engine.resolve()
    return os.path.normpath((engine if engine.absolute() == real else real) / source.name)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The complete manifest."""

    schema_version: int
    tool_version: str
    source: Source
    draft: DraftSpec
    target: TargetSpec
    graphs: dict[str, Graph]
    plugin: Plugin
    quantization: Quantization
    sha256: dict[str, str]
    """Every other file of the directory, by name."""
    target_source: TargetSource | None = None
    plan_options: PlanOptions | None = None
    """Options of this directory's TensorRT plans; None until plans are requested."""
    plans: dict[str, Plan] = {}
    """Plans by graph; none in a directory for ONNX Runtime only."""
    num_ranks: NumRanks = 1
    """Number of ranks whose shards lie in directories below this one; `draft` is whole."""
    shard: Shard | None = None
    """Shard that this directory holds; `draft` then has the rank's heads and MLP channels."""

    def encode(self) -> bytes:
        """JSON, indented, the same bytes for the same facts."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Reads an engine directory's manifest and checks every hash in it.

    Raises EngineError for a directory that is not an engine, another schema version, or missing or changed files.
    """
    file = directory / MANIFEST
    rebuild = "dflash-trt build DRAFT --target TARGET -o DIR"
    if not file.is_file():
        raise _not_an_engine(directory)
    what = "an engine manifest"
    version = read_json(file, SchemaVersion, EngineError, what=what, hint=rebuild).schema_version
    if version != SCHEMA_VERSION:
        hint = f"build it again with this version: {rebuild}"
        if version > SCHEMA_VERSION:
            hint = f"it was built by a newer dflash-trt than {__version__}: install that one"
        raise EngineError(f"{file}: schema_version: expected {SCHEMA_VERSION}, found {version}", hint=hint)
    manifest = read_json(file, Manifest, EngineError, what=what, hint=rebuild)
    _check_graphs(file, manifest, rebuild)
    graphs = {graph.file for graph in manifest.graphs.values()}
    relied_on = {SINGLE} | graphs | {plan.file for plan in manifest.plans.values()}
    if unhashed := sorted(relied_on - manifest.sha256.keys()):
        raise EngineError(f"{file}: missing key sha256.{unhashed[0]}", hint=rebuild)
    for name, expected in manifest.sha256.items():
        _check_file(directory, name, expected, rebuild)
    return manifest


def _not_an_engine(directory: Path) -> EngineError:
    """Error that says what was found instead, with the command that builds an engine from it."""
    draft, target, found = "DRAFT", "TARGET", f"a directory without {MANIFEST}"
    if not directory.exists():
        found = "nothing there"
        if REPOSITORY_ID.fullmatch(name := str(directory)):
            found = "the id of a Hugging Face repository, and no such directory"
            draft, target = (name, target) if "dflash" in name.lower() else (draft, name)
    elif directory.is_file():
        found = "a file"
    elif (directory / "config.json").is_file():
        found = "a checkpoint"
    build = f"dflash-trt build {draft} --target {target} -o engine"
    return EngineError(f"{directory} is not an engine directory: found {found}", hint=f"make one: {build}")


class _Ranks(msgspec.Struct):
    num_ranks: NumRanks = 1


def read_num_ranks(directory: Path) -> int | None:
    """num_ranks of an engine directory, whose files are not checked; None if it is not one.

    Raises EngineError for a manifest that cannot be read.
    """
    file = directory / MANIFEST
    return read_json(file, _Ranks, EngineError, what="an engine manifest").num_ranks if file.is_file() else None


def read_shard(directory: Path, whole: Manifest, rank: int) -> tuple[Path, Manifest]:
    """The directory and the manifest of a rank of the engine in `directory`, whose manifest is `whole`.

    Raises as `read_manifest` does, and EngineError where another rank's, or another engine's, is in its place.
    """
    expected = Shard(rank=rank, num_ranks=whole.num_ranks)
    place = directory / expected.directory
    rebuild = f"dflash-trt build DRAFT --target TARGET --tp {whole.num_ranks} -o DIR --force"
    try:
        manifest = read_manifest(place)
    except EngineError as problem:
        raise EngineError(problem.message, hint=rebuild) from None
    if manifest.shard != expected:
        raise EngineError(f"{place}: expected the heads of {expected}, found {manifest.shard or 'all'}", hint=rebuild)
    if (manifest.source, manifest.target_source) != (whole.source, whole.target_source):
        raise EngineError(f"{place} is a shard of another engine than {directory}", hint=rebuild)
    return place, manifest


def read_parts(directory: Path, whole: Manifest) -> list[tuple[Path, Manifest]]:
    """Directory and manifest that each rank runs: its shard, or once the whole engine; raises as `read_shard` does."""
    parts = [read_shard(directory, whole, shard.rank) for shard in shards(whole.num_ranks)]
    return parts or [(directory, whole)]


def _check_graphs(file: Path, manifest: Manifest, rebuild: str) -> None:
    """Raises EngineError unless the graphs have the signatures that this version writes, on which callers rely."""
    is_shard = manifest.shard is not None
    signatures = graph_signatures(manifest.draft, manifest.quantization, is_shard=is_shard)
    if set(manifest.graphs) != set(signatures):
        found = cut(", ".join(sorted(manifest.graphs))) or "none"
        names = f"those of {manifest.draft.num_layers} layers in segments" if is_shard else " and ".join(signatures)
        raise EngineError(f"{file}: graphs: expected {names}, found {found}", hint=rebuild)
    for name, expected in signatures.items():
        if (graph := manifest.graphs[name]) != expected:
            raise EngineError(
                f"{file}: graphs.{name}: expected {msgspec.json.encode(expected).decode()} (from its draft),"
                f" found {msgspec.json.encode(graph).decode()}",
                hint=rebuild,
            )


def _check_file(directory: Path, name: str, expected: str, rebuild: str) -> None:
    if not is_file_name(name):
        raise EngineError(f"{directory / MANIFEST}: expected file names without directories, found {shown(name)}")
    file = directory / name
    if not file.is_file():
        raise EngineError(f"{file}: missing file of the engine", hint=rebuild)
    if (found := sha256(file)) != expected:
        raise EngineError(f"{file}: expected sha256 {expected}, found {found}: the file has changed", hint=rebuild)


def sha256(file: Path) -> str:
    """Hex digest of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
        return bool(msgspec.json.decode(read_bytes(file, EngineError, limit=MAX_MANIFEST_BYTES), type=_Marker))
    except (EngineError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


ENGINE = OutputKind(name="an engine directory", recognizes=is_engine)
