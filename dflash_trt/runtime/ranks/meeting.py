# SPDX-License-Identifier: Apache-2.0
"""Where the ranks find each other: under torchrun in its store, under mpiexec through MPI."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from dflash_trt.errors import RankError
from dflash_trt.launch_environment import MASTER_ADDRESS, Launch, import_mpi, is_one_host, torchrun_variables
from dflash_trt.runtime.ranks.key import VARIABLE, fresh_key, key_file, read_key_file
from dflash_trt.runtime.ranks.link import Link
from dflash_trt.runtime.ranks.reception import CHECK_KEY, MAX_WAITING, START_SECONDS, call_leader, receive_followers

LOOPBACK = "127.0.0.1"
_STORE_KEY = "dflash_trt/link"


class Store(Protocol):
    """What is used of a store of torch.distributed, which anybody who reaches it may read and write."""

    def set(self, key: str, value: str) -> None:
        """Publishes a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks share."""

    store: Store
    address: str
    """of rank 0"""
    key: bytes | None
    """None: rank 0 leaves one in a file of this host"""

    def link_followers(self, size: int) -> dict[int, Link]:
        """Rank 0's links to all others, by rank; it listens at `address`, and nowhere else."""
        if self.key is not None:
            return self._receive(self.key, "", size)
        key = fresh_key()
        with key_file(key) as file:
            return self._receive(key, str(file), size)

    def link_leader(self, rank: int) -> Link:
        """The link of another rank to rank 0."""
        port, _, file = self.store.get(_STORE_KEY).decode().partition(" ")
        key = read_key_file(Path(file)) if self.key is None else self.key
        return call_leader(self.address, int(port), key, rank)

    def _receive(self, key: bytes, file: str, size: int) -> dict[int, Link]:
        server = socket.create_server((self.address, 0), backlog=MAX_WAITING)
        self.store.set(_STORE_KEY, f"{server.getsockname()[1]} {file}")
        return receive_followers(server, key, size)


def meet(launch: Launch, key: bytes | None) -> Meeting:
    """Finds the other ranks; `key` is the one that the user gives, if any."""
    if launch.by_mpiexec:
        return _meet_by_mpi(launch, key)
    from torch.distributed.rendezvous import rendezvous

    if is_one_host(os.environ):
        _stay_on_this_host()
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
    except (ValueError, RuntimeError) as error:
        raise RankError(f"environment: expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, found: {error}") from None
    return Meeting(store, os.environ[MASTER_ADDRESS], key)


def _meet_by_mpi(launch: Launch, given: bytes | None) -> Meeting:
    """MPI is only asked who is where, and carries a key; the work then goes as under torchrun."""
    mpi = import_mpi("started by mpiexec", ", or start with torchrun")
    from torch import distributed

    world = mpi.COMM_WORLD
    if world.Get_size() != launch.size:
        raise RankError(
            f"mpi4py: expected {launch.size} ranks as mpiexec started, found {world.Get_size()}",
            hint="use the mpiexec of the MPI that mpi4py finds, or torchrun",
        )
    host = socket.gethostname()
    if set(world.allgather(host)) == {host}:
        _stay_on_this_host()
        address = LOOPBACK
    else:
        address = world.bcast(os.environ.get(MASTER_ADDRESS, host))
    key = world.bcast(fresh_key() if given is None else None) or given
    if key is None:
        raise RankError(f"{VARIABLE}: expected the key that rank 0 has, found none", hint=CHECK_KEY)
    neighbours = world.Split_type(mpi.COMM_TYPE_SHARED)
    # transformers reads what torchrun would have set.
    os.environ |= torchrun_variables(launch.rank, launch.size, neighbours.Get_rank(), neighbours.Get_size())
    server = socket.create_server((address, 0)) if launch.rank == 0 else None
    port = world.bcast(server.getsockname()[1] if server else None)
    mpi.Finalize()
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        launch.size,
        is_master=server is not None,
        timeout=timedelta(seconds=START_SECONDS),
        wait_for_workers=False,
        master_listen_fd=server.detach() if server else None,
    )
    return Meeting(store, address, key)


def _stay_on_this_host() -> None:
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
