# SPDX-License-Identifier: Apache-2.0
"""`mpiexec -n N dflash-trt doctor --ranks`: do all ranks see the same engine, plugin and versions, each its own GPU?"""

from __future__ import annotations

import hashlib
import platform
import socket
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_trt import __version__
from dflash_trt.cli.machine_report import package_version
from dflash_trt.engine.manifest import MANIFEST, read_manifest, read_parts, sha256
from dflash_trt.engine.plans.machine import Gpu, visible_gpus
from dflash_trt.errors import DFlashError
from dflash_trt.trtllm.launch_environment import import_mpi

PACKAGES = ("tensorrt", "tensorrt_llm", "torch")
MISSING = "missing"
ENGINE_RANKS = "ranks of the engine"
"""Those that share its drafter; 1: each runs all of it."""
BUG = 70


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees."""

    rank: int
    host: str
    gpu: Gpu | None
    facts: dict[str, str]
    """What must be the same everywhere."""

    def fact(self, name: str) -> str:
        """One of them, MISSING where this rank was not asked for it."""
        return self.facts.get(name, MISSING)


def gather_ranks(engine: Path | None) -> list[Rank] | None:
    """Every rank's view, on rank 0; None on the others. Collective. MissingDependencyError where there is no MPI."""
    mpi = import_mpi("--ranks")
    world = mpi.COMM_WORLD
    try:
        local_rank = world.Split_type(mpi.COMM_TYPE_SHARED).Get_rank()
        gathered: list[Rank] | None = world.gather(look(world.Get_rank(), local_rank, engine))
    except Exception:
        traceback.print_exc()
        world.Abort(BUG)  # the others would wait for this rank for ever
        raise
    return gathered


def look(rank: int, local_rank: int, engine: Path | None) -> Rank:
    """The view of this process, which is the `local_rank`-th of its host."""
    facts = {"dflash-trt": __version__, "Python": platform.python_version()}
    facts |= {package: package_version(package) or MISSING for package in PACKAGES}
    facts["plugin sha256"] = _plugin_hash()
    if engine is not None:
        facts |= _engine(engine)
    return Rank(rank=rank, host=socket.gethostname(), gpu=_gpu(local_rank), facts=facts)


def problems(ranks: Sequence[Rank]) -> list[str]:
    """What does not fit together, each with the rank it was seen on."""
    return [*_differences(ranks), *_damage(ranks), *_too_few(ranks), *_shared_gpus(ranks)]


def fact_names(ranks: Sequence[Rank]) -> list[str]:
    """Those of all ranks: some may have been given an engine, and others none."""
    return list(dict.fromkeys(name for rank in ranks for name in rank.facts))


def _differences(ranks: Sequence[Rank]) -> list[str]:
    differences = []
    for fact in fact_names(ranks):
        usual, count = Counter(rank.fact(fact) for rank in ranks).most_common(1)[0]
        differences += [
            f"rank {rank.rank} ({rank.host}): {fact}: expected {usual} as on {count} of {len(ranks)} ranks,"
            f" found {rank.fact(fact)}"
            for rank in ranks
            if rank.fact(fact) != usual
        ]
    return differences


def _damage(ranks: Sequence[Rank]) -> list[str]:
    """An engine that nobody can read is the same everywhere, and still no engine."""
    broken = {rank.facts.get("engine sha256", "") for rank in ranks}
    return sorted(broken) if len(broken) == 1 and " " in next(iter(broken)) else []


def _too_few(ranks: Sequence[Rank]) -> list[str]:
    """Ranks that share a drafter compute with all others; several servers' ranks may be asked at once."""
    numbers = {int(rank.facts.get(ENGINE_RANKS, 1)) for rank in ranks}
    return [
        f"engine: expected {number} ranks, which share its drafter, or several times as many, found {len(ranks)}"
        for number in sorted(numbers)
        if len(ranks) % number
    ]


def _shared_gpus(ranks: Sequence[Rank]) -> list[str]:
    """Ranks without a GPU beside ranks with one, and ranks that share one."""
    if all(rank.gpu is None for rank in ranks):
        return []
    conflicts, owners = [], dict[tuple[str, str], int]()
    for rank in ranks:
        if rank.gpu is None:
            conflicts.append(f"rank {rank.rank} ({rank.host}): no usable GPU found")
        elif (owner := owners.setdefault((rank.host, rank.gpu.uuid), rank.rank)) != rank.rank:
            conflicts.append(
                f"rank {rank.rank} ({rank.host}): expected a GPU of its own, found {rank.gpu.name} {rank.gpu.uuid},"
                f" which rank {owner} uses"
            )
    return conflicts


def _gpu(local_rank: int) -> Gpu | None:
    """The only visible GPU, or the one that a launcher's local rank counts off."""
    try:
        gpus = visible_gpus()
    except DFlashError:
        return None
    index = 0 if len(gpus) == 1 else local_rank
    return gpus[index] if index < len(gpus) else None


def _engine(engine: Path) -> dict[str, str]:
    """A hash of the manifests, which hold the hashes of all other files; those are checked."""
    try:
        manifest = read_manifest(engine)
        parts = read_parts(engine, manifest)
        hashes = [sha256(directory / MANIFEST) for directory in dict.fromkeys([engine, *(part for part, _ in parts)])]
    except DFlashError as error:
        return {"engine sha256": error.message}
    whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return {"engine sha256": whole, ENGINE_RANKS: str(manifest.num_ranks)}


def _plugin_hash() -> str:
    try:
        from dflash_trt.engine.plans.tensorrt_api import plugin_library

        return sha256(plugin_library())
    except (DFlashError, ImportError):
        return MISSING
