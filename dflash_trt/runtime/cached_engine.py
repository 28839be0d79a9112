# SPDX-License-Identifier: Apache-2.0
"""Engines of draft checkpoints, built on demand in the user's cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_trt import __version__
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.source import GGUF, REPOSITORY_ID, checkpoint_label, is_local
from dflash_trt.deploy.catalog import known_pair
from dflash_trt.engine.manifest import MANIFEST, SCHEMA_VERSION, is_engine, sha256
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.files.command import quoted


def cache_directory() -> Path:
    """dflash-trt/engines in $XDG_CACHE_HOME, or in ~/.cache where that is not an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "dflash-trt" / "engines"


def is_checkpoint(name: str, target: str | None) -> bool:
    """Whether `name` is a checkpoint rather than an engine directory; a repository's target must be known or given.

    Fetches nothing.
    """
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / MANIFEST).exists()
    if path.exists():
        return path.suffix == GGUF
    return bool(REPOSITORY_ID.fullmatch(name)) and (target is not None or known_pair(name) is not None)


def engine_of(name: str, target: str | None, draft: str | None = None) -> tuple[Path, str | None]:
    """The engine directory of `name`, and the target where it is known: that of a checkpoint is built if necessary.

    `name` is an engine directory, a draft or target of the catalogue by its repository id, a draft checkpoint with its
    `target`, or with a `draft` the target itself. Raises what `built_engine` raises.
    """
    if draft is not None:
        return built_engine(draft, name)
    return built_engine(name, target) if is_checkpoint(name, target) else (Path(name), target)


def built_engine(draft: str, target: str | None) -> tuple[Path, str]:
    """The engine directory of a draft checkpoint and the name of its target; builds the engine unless it is cached.

    Without `target`, `draft` may be either of a pair of the catalogue, by its repository id. The engine is unquantised;
    it is identified by the hashes of the draft's files and the target's config.json, and is complete or absent. Raises
    EngineError where the target is unknown, CheckpointError as `read_pair` does, BuildError where the cache cannot be
    written.
    """
    if target is None:
        draft, target = _usual_pair(draft)
    source, partner = read_pair(draft, target)
    from dflash_trt.engine.engine_directory import BuildOptions, build_engine, describe_source  # it loads onnx

    identity = (
        __version__, SCHEMA_VERSION, describe_source(source, draft).sha256,
        target, sha256(partner.directory / "config.json"),
    )  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:16]
    engine = cache_directory() / f"{checkpoint_label(draft).replace('/', '--')}-{digest}"
    with _sole_builder(engine):
        if not is_engine(engine):
            print(f"building the engine of {draft} for {target} in {engine}", file=sys.stderr)
            build_engine(
                BuildOptions(draft=source, draft_name=draft, target=partner, target_name=target, output=engine)
            )
    return engine, target


def _usual_pair(name: str) -> tuple[str, str]:
    """The catalogue's draft and target of a repository that is either."""
    pair = None if is_local(name) else known_pair(name)
    if pair is None:
        raise EngineError(
            f"{name} is a checkpoint, not an engine directory, and its target is not known",
            hint="give target (--target), the model that the draft was trained for; to serve a target: --draft",
        )
    return pair[0].draft, pair[1]


@contextmanager
def _sole_builder(engine: Path) -> Iterator[None]:
    """Waits until no other process builds `engine`; where the file system has no locks, all build at once."""
    try:
        engine.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(engine.with_name(f"{engine.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BuildError(
            f"cannot write {engine.parent}: {error.strerror}",
            hint=f"set XDG_CACHE_HOME to another directory, or build the engine: dflash-trt build {quoted(engine)}",
        ) from None
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
