# SPDX-License-Identifier: Apache-2.0
"""Joins the processes that torchrun or mpiexec started."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from dflash_trt.errors import DFlashError, RankError
from dflash_trt.runtime.ranks.roles import ALONE, LINGER_SECONDS, Followed, Follower, Leader
from dflash_trt.trtllm.launch_environment import (
    LOCAL_RANK,
    LOCAL_SIZE,
    MASTER_ADDRESS,
    Launch,
    import_mpi,
    is_one_host,
    is_torchrun,
    read_launch,
    torchrun_variables,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dflash_trt.runtime.ranks.link import Link

START_TIMEOUT = timedelta(seconds=300)
LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def join(num_ranks: int, device: str = "auto") -> Iterator[Leader | Follower]:
    """Joins `num_ranks` processes for as long as the context lasts; a single process joins no group.

    All ranks then `verify_same_facts`. The other ranks leave the block where the target is opened, after following rank
    0 to its end, and print nothing: rank 0 reports their errors. `device` is "cpu", "cuda" or "auto": CUDA if torch
    finds it. Raises RankError if the launcher started another number of processes.
    """
    launch = read_launch(os.environ)
    if launch.size != num_ranks:
        _refuse(launch, _wrong_number(launch, num_ranks))
    if is_torchrun(os.environ):
        _end_with_parent()
    if num_ranks == 1:
        yield ALONE
    elif launch.rank == 0:
        yield from _lead(launch, device)
    else:
        yield from _follow(launch, device)


def _end_with_parent() -> None:
    """Ends this process with its parent: if torchrun is killed, its ranks would survive."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _lead(launch: Launch, device: str) -> Iterator[Leader]:
    from torch import distributed

    leader = Leader(_connect(launch, device))
    try:
        _use_device()
        yield leader
    except BaseException as error:
        leader.abort(error)
        raise
    leader.shutdown()
    distributed.destroy_process_group()


def _follow(launch: Launch, device: str) -> Iterator[Follower]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns when rank 0 ends first; read as it is imported
    from torch import distributed

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks, and rank 0 ends the others
    _silence()
    follower = Follower(launch.rank, launch.size, _connect(launch, device)[0])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it to all ranks
    try:
        _use_device()
        yield follower
    except Followed:
        pass
    except Exception as error:
        follower.fail(str(error) if isinstance(error, DFlashError) else traceback.format_exc())
        sys.exit(1)
    follower.finish()
    distributed.destroy_process_group()


def _connect(launch: Launch, device: str) -> dict[int, Link]:
    """Starts torch's process groups; rank 0's links to all others, or the link of another rank to rank 0."""
    from torch import distributed

    from dflash_trt.runtime.ranks.link import Link

    backend = _backend(device)
    store = _mpi_store(launch) if launch.by_mpiexec else _torchrun_store()
    store = distributed.PrefixStore("dflash_trt", store)  # type: ignore[attr-defined]
    _wait_for_all(store, launch)
    distributed.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size)
    # a separate group, so that no collective delays it
    group = distributed.new_group(backend="gloo", timeout=START_TIMEOUT)
    return {rank: Link(group, rank) for rank in (range(1, launch.size) if launch.rank == 0 else [0])}


def _torchrun_store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    if is_one_host(os.environ):
        _stay_on_this_host()
    try:
        store: Store = next(rendezvous("env://", timeout=START_TIMEOUT))[0]
    except (ValueError, RuntimeError) as error:
        raise RankError(f"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: the ranks cannot meet: {error}") from None
    return store


def _mpi_store(launch: Launch) -> Store:
    """MPI is only asked who is where; the work then goes as under torchrun."""
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
    neighbours = world.Split_type(mpi.COMM_TYPE_SHARED)
    # transformers reads what torchrun would have set.
    os.environ |= torchrun_variables(launch.rank, launch.size, neighbours.Get_rank(), neighbours.Get_size())
    server = socket.create_server((address, 0)) if launch.rank == 0 else None
    port = world.bcast(server.getsockname()[1] if server else None)
    mpi.Finalize()
    return distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        launch.size,
        is_master=server is not None,
        timeout=START_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=server.detach() if server else None,
    )


def _stay_on_this_host() -> None:
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _wait_for_all(store: Store, launch: Launch) -> None:
    """Raises RankError with the ranks that have not come; torch would wait longer, and name none."""
    keys = {rank: f"rank {rank}" for rank in range(launch.size)}
    store.set(keys[launch.rank], "here")
    try:
        store.wait(list(keys.values()), START_TIMEOUT)
    except RuntimeError:
        missing = ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
        raise RankError(
            f"ranks {missing}: did not start within {START_TIMEOUT.seconds} s",
            hint="start all ranks with one launcher",
        ) from None


def _backend(device: str) -> str:
    import torch

    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers shards onto whatever accelerator it sees
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _use_device() -> None:
    """Gives this rank its own GPU, or its share of the cores."""
    import torch

    if not torch.cuda.is_available():
        # Ranks share the cores: threads of their own would fight over them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return
    num_ranks, num_gpus = int(os.environ.get(LOCAL_SIZE, "1")), torch.cuda.device_count()
    if num_ranks > num_gpus:
        raise RankError(
            f"expected a GPU for each of the {num_ranks} ranks on this host, found {num_gpus}",
            hint="start as many ranks as there are GPUs, or decode with --device cpu",
        )
    torch.cuda.set_device(int(os.environ.get(LOCAL_RANK, "0")))


def _silence() -> None:
    """Leaves warnings about the target to rank 0."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("dflash_trt").setLevel(logging.ERROR)


def _refuse(launch: Launch, error: RankError) -> NoReturn:
    """Reports on rank 0 alone an error that all ranks find."""
    if launch.rank == 0:
        raise error
    time.sleep(LINGER_SECONDS)
    sys.exit(1)


def _wrong_number(launch: Launch, num_ranks: int) -> RankError:
    command = shlex.join(sys.argv[1:])
    if num_ranks == 1:
        return RankError(
            f"expected one process, because there is no --tp, found {launch.size}",
            hint=f"dflash-trt {command}, or give --tp {launch.size}",
        )
    return RankError(
        f"--tp {num_ranks}: expected {num_ranks} processes, one for each rank, found {launch.size}",
        hint=f"torchrun --nproc-per-node {num_ranks} -m dflash_trt {command}",
    )
