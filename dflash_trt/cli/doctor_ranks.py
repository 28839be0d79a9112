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

import click
import msgspec

from dflash_trt import __version__
from dflash_trt.cli.doctor_machine import package_version
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.engine.manifest import MANIFEST, read_manifest, read_parts, sha256
from dflash_trt.engine.plans.machine import Gpu, visible_gpus
from dflash_trt.errors import DFlashError, RankError
from dflash_trt.trtllm.launch_environment import import_mpi

PACKAGES = ("tensorrt", "tensorrt_llm", "torch")
MISSING = "missing"
ENGINE, ENGINE_RANKS = "engine sha256", "ranks of the engine"
BUG = 70
HASH_DIGITS = 12  # digits of 64: enough to distinguish files, and fits a column


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of its machine."""

    rank: int
    host: str
    gpu: Gpu | None
    facts: dict[str, str]
    """Facts that must be the same on all ranks."""

    def fact(self, name: str) -> str:
        """One of the facts; MISSING on a rank that was not asked for it."""
        return self.facts.get(name, MISSING)


def compare_ranks(engine: Path | None, *, as_json: bool) -> None:
    """Print on rank 0 what the ranks see; RankError where they differ. Collective."""
    ranks = gather_ranks(engine)
    if ranks is None:
        return
    odd = problems(ranks)
    if as_json:
        print_json("doctor-ranks", {"ranks": ranks, "problems": odd})
    else:
        print_ranks(ranks)
    if all(rank.gpu is None for rank in ranks):
        click.echo("no rank sees a GPU: only files and versions were compared", err=True)
    if odd:
        raise RankError("\n".join(odd), hint="make the ranks match, then run this again")


def gather_ranks(engine: Path | None) -> list[Rank] | None:
    """Every rank's view, on rank 0; None on the others. Collective. MissingDependencyError without MPI."""
    mpi = import_mpi("--ranks")
    world = mpi.COMM_WORLD
    try:
        local_rank = world.Split_type(mpi.COMM_TYPE_SHARED).Get_rank()
        gathered: list[Rank] | None = world.gather(look(world.Get_rank(), local_rank, engine))
    except Exception:
        traceback.print_exc()
        world.Abort(BUG)  # the other ranks would wait forever
        raise
    return gathered


def look(rank: int, local_rank: int, engine: Path | None) -> Rank:
    """View of this process, the `local_rank`-th of its host."""
    facts = {"dflash-trt": __version__, "Python": platform.python_version()}
    facts |= {package: package_version(package) or MISSING for package in PACKAGES}
    facts["plugin sha256"] = _plugin_hash()
    if engine is not None:
        facts |= _engine(engine)
    return Rank(rank=rank, host=socket.gethostname(), gpu=_gpu(local_rank), facts=facts)


def print_ranks(ranks: Sequence[Rank]) -> None:
    """Facts that all ranks share once, the others rank by rank."""
    first, names = ranks[0], _fact_names(ranks)
    differing = [name for name in names if any(rank.fact(name) != first.fact(name) for rank in ranks)]
    common = [(name, first.fact(name)) for name in names if name not in differing]
    print_table(f"on all {len(ranks)} ranks", ("what", "found"), common)
    rows = [
        (
            str(rank.rank),
            rank.host,
            "none" if rank.gpu is None else f"{rank.gpu.name} {rank.gpu.uuid}",
            *(rank.fact(name)[:HASH_DIGITS] if "sha256" in name else rank.fact(name) for name in differing),
        )
        for rank in ranks
    ]
    print_table(f"{len(ranks)} ranks", ("rank", "host", "GPU", *differing), rows)


def problems(ranks: Sequence[Rank]) -> list[str]:
    """Differences between ranks, an engine that no rank can read, too few ranks, and GPUs that ranks share."""
    found = []
    for name in _fact_names(ranks):
        usual, count = Counter(rank.fact(name) for rank in ranks).most_common(1)[0]
        found += [
            f"rank {rank.rank} ({rank.host}): {name}: expected {usual} as on {count} of {len(ranks)} ranks,"
            f" found {rank.fact(name)}"
            for rank in ranks
            if rank.fact(name) != usual
        ]
    engines = {rank.facts.get(ENGINE, "") for rank in ranks}
    found += [engine for engine in engines if len(engines) == 1 and " " in engine]  # an equal read error on every rank
    found += [
        f"engine: expected {number} ranks, which share its drafter, or several times as many, found {len(ranks)}"
        for number in sorted({int(rank.facts.get(ENGINE_RANKS, 1)) for rank in ranks})
        if len(ranks) % number
    ]
    return found + _shared_gpus(ranks)


def _fact_names(ranks: Sequence[Rank]) -> list[str]:
    """All names: some ranks may have been given an engine, and others none."""
    return list(dict.fromkeys(name for rank in ranks for name in rank.facts))


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
    """The only visible GPU, or that of the launcher's local rank."""
    try:
        gpus = visible_gpus()
    except DFlashError:
        return None
    index = 0 if len(gpus) == 1 else local_rank
    return gpus[index] if index < len(gpus) else None


def _engine(engine: Path) -> dict[str, str]:
    """Hash of the manifests, which hold the hashes of all other files; those are checked."""
    try:
        manifest = read_manifest(engine)
        parts = read_parts(engine, manifest)
        hashes = [sha256(directory / MANIFEST) for directory in dict.fromkeys([engine, *(part for part, _ in parts)])]
    except DFlashError as error:
        return {ENGINE: error.message}
    whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return {ENGINE: whole, ENGINE_RANKS: str(manifest.num_ranks)}


def _plugin_hash() -> str:
    try:
        from dflash_trt.engine.plans.tensorrt_api import plugin_library

        return sha256(plugin_library())
    except (DFlashError, ImportError):
        return MISSING
