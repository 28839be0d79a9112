# SPDX-License-Identifier: Apache-2.0
"""Joins the processes that torchrun or mpiexec started: who is this one, and where are the others?"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from dflash_trt.errors import DFlashError, RankError
from dflash_trt.launch_environment import LOCAL_RANK, LOCAL_SIZE, Launch, read_launch
from dflash_trt.runtime.ranks.key import given_key
from dflash_trt.runtime.ranks.meeting import Store, meet
from dflash_trt.runtime.ranks.roles import LINGER_SECONDS, Follower, Leader


@contextmanager
def join(num_ranks: int, device: str = "auto") -> Iterator[Leader | Follower]:
    """Joins `num_ranks` processes for as long as the context lasts; one process is alone and joins nobody.

    All ranks then `agree`, and the others follow rank 0. They end silently: what goes wrong on them, rank 0 says.
    `device` is "cpu", "cuda" or "auto": CUDA where torch sees it. Raises RankError when the launcher started another
    number of processes.
    """
    launch = read_launch(os.environ)
    if launch.size != num_ranks:
        _refuse(launch, _wrong_number(launch, num_ranks))
    if num_ranks == 1:
        yield Leader({})
        return
    try:
        key = given_key(launch, os.environ)
    except RankError as error:
        _refuse(launch, error)
    if launch.rank == 0:
        yield from _lead(launch, key, device)
    else:
        yield from _follow(launch, key, device)


def _lead(launch: Launch, key: bytes | None, device: str) -> Iterator[Leader]:
    from torch import distributed

    meeting = meet(launch, key)
    leader = Leader(meeting.link_followers(launch.size))
    try:
        _init_process_group(meeting.store, launch, device)
        yield leader
    except BaseException as error:
        leader.abandon(error)
        raise
    leader.dismiss()
    distributed.destroy_process_group()


def _follow(launch: Launch, key: bytes | None, device: str) -> Iterator[Follower]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns when rank 0 ends first; read as it is imported
    from torch import distributed

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks, and rank 0 ends the others
    _silence_transformers()
    meeting = meet(launch, key)
    follower = Follower(launch.rank, launch.size, meeting.link_leader(launch.rank))
    try:
        _init_process_group(meeting.store, launch, device)
        yield follower
    except Exception as error:
        follower.report(str(error) if isinstance(error, DFlashError) else traceback.format_exc())
        sys.exit(1)
    distributed.destroy_process_group()
    follower.leave()


def _init_process_group(store: Store, launch: Launch, device: str) -> None:
    from torch import distributed

    own = distributed.PrefixStore("dflash_trt", store)  # type: ignore[attr-defined, arg-type]
    distributed.init_process_group(_backend(device), store=own, rank=launch.rank, world_size=launch.size)


def _backend(device: str) -> str:
    import torch

    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers shards onto whatever accelerator it sees
    if not torch.cuda.is_available():
        # Ranks share the cores: threads of their own would fight over them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return "gloo"
    num_ranks, num_gpus = int(os.environ.get(LOCAL_SIZE, "1")), torch.cuda.device_count()
    if num_ranks > num_gpus:
        raise RankError(
            f"expected a GPU for each of the {num_ranks} ranks on this host, found {num_gpus}",
            hint="start as many ranks as there are GPUs, or decode with --device cpu",
        )
    torch.cuda.set_device(int(os.environ.get(LOCAL_RANK, "0")))
    return "cpu:gloo,cuda:nccl"


def _silence_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _refuse(launch: Launch, error: RankError) -> NoReturn:
    """What all ranks find, only rank 0 says."""
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
