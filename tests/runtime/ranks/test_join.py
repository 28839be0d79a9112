# SPDX-License-Identifier: Apache-2.0
"""Ranks find their number, each other, and a transport: with one process, or with threads as ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from dflash_trt.errors import RankError
from dflash_trt.runtime.ranks.join import _backend, _use_device, join
from dflash_trt.runtime.ranks.link import FRAME_BYTES, LENGTH_BYTES, MAX_MESSAGE_BYTES, Link
from dflash_trt.runtime.ranks.roles import LINGER_SECONDS, Failed, Followed, Follower, Leader, _difference, _failure
from dflash_trt.runtime.ranks.sharded_target import ShardedTarget, follow
from dflash_trt.runtime.targets.target import Segment, Verified
from dflash_trt.trtllm.launch_environment import Launch, read_launch
from tests.paths import REPOSITORY
from tests.waiting import PATIENCE, until

LAUNCHERS = {"RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch(0, 1, by_mpiexec=False)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Launch(3, 8, by_mpiexec=False)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}, Launch(1, 2, by_mpiexec=True)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launch(1, 2, by_mpiexec=True)),
        ({"WORLD_SIZE": "8"}, Launch(0, 1, by_mpiexec=False)),
    ],
)
def test_the_launcher_says_who_we_are(environment: dict[str, str], expected: Launch) -> None:
    assert read_launch(environment) == expected
    with pytest.raises(RankError, match="expected whole numbers, found RANK=one, WORLD_SIZE=2"):
        read_launch({"RANK": "one", "WORLD_SIZE": "2"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_joins_nobody(alone: pytest.MonkeyPatch) -> None:
    with join(1) as ranks:
        ranks.verify_same_facts({"engine": "A"})
        assert (ranks.rank, ranks.size) == (0, 1)
    assert not torch.distributed.is_initialized()


def test_too_few_processes(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(sys, "argv", ["dflash-trt", "generate", "my engine", "--tp", "8"])
    with pytest.raises(RankError) as caught, join(8):
        pass
    assert caught.value.message == "--tp 8: expected 8 processes, one for each rank, found 1"
    assert caught.value.hint == "torchrun --nproc-per-node 8 -m dflash_trt generate 'my engine' --tp 8"


def test_processes_that_nobody_asked_for(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "4")
    alone.setattr(sys, "argv", ["dflash-trt", "generate", "engine"])
    with pytest.raises(RankError, match="expected one process, because there is no --tp, found 4") as caught, join(1):
        pass
    assert caught.value.hint == "dflash-trt generate engine, or give --tp 4"


def test_of_a_wrong_number_of_processes_only_rank_0_speaks(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "2")
    alone.setenv("WORLD_SIZE", "4")
    begin = time.monotonic()
    with pytest.raises(SystemExit) as caught, join(8):
        pass
    assert caught.value.code == 1
    assert time.monotonic() - begin > LINGER_SECONDS, "a launcher that sees this rank end first kills rank 0"


def test_each_rank_needs_a_gpu_unless_it_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is told that there are four GPUs; NCCL itself needs them."""
    bound: list[int] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _backend("auto") == "cpu:gloo,cuda:nccl"
    _use_device()
    assert bound == [3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(RankError, match="expected a GPU for each of the 8 ranks on this host, found 4"):
        _use_device()
    assert _backend("cpu") == "gloo"


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("2", 2)])
def test_a_rank_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(3)
    _use_device()
    assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("expected", "found", "verdict"),
    [
        ({"a": "1"}, {}, ""),
        ({"a": "1", "b": "2"}, {1: {"a": "1", "b": "2"}}, ""),
        ({"a": "1"}, {1: {"a": "1"}, 2: {"a": "0"}}, "rank 2: a: expected 1 as on rank 0, found 0"),
        ({"a": "1"}, {1: {"a": "0"}, 2: {"a": "0"}}, "rank 0: a: expected 0 as on the other ranks, found 1"),
        ({"a": "1"}, {1: {"a": "0"}, 2: {"a": "2"}}, "rank 1: a: expected 1 as on rank 0, found 0"),
        ({"a": "1"}, {1: {"a": "0"}}, "rank 1: a: expected 1 as on rank 0, found 0"),
        ({"a": "1", "b": "2"}, {1: {"a": "1", "b": "0"}}, "rank 1: b: expected 2 as on rank 0, found 0"),
    ],
)
def test_the_odd_rank_is_named(expected: dict[str, str], found: dict[int, dict[str, str]], verdict: str) -> None:
    assert _difference(expected, found) == verdict


@pytest.mark.parametrize(
    ("failed", "cause"),
    [
        ({2: Failed("an error")}, "rank 2: an error"),
        ({2: Failed("stumbled"), 1: None, 3: Failed("stumbled")}, "rank 1: its process ended unexpectedly"),
        ({3: Failed("first"), 1: Failed("second")}, "rank 3: first"),
    ],
)
def test_a_lost_rank_goes_before_what_followed_from_it(failed: dict[int, Failed | None], cause: str) -> None:
    assert _failure(failed) == cause


def connected() -> list[Link]:
    """The links of rank 0 and rank 1 to each other."""
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch's stub lacks it

    def connect(rank: int) -> Link:
        return Link(distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE)), 1 - rank)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(connect, range(2)))


@pytest.mark.parametrize("length", [0, 1, FRAME_BYTES - LENGTH_BYTES, FRAME_BYTES - LENGTH_BYTES + 1, 5_000_000])
def test_messages_arrive_whole_and_in_order(length: int) -> None:
    here, there = connected()
    messages = [bytes(range(256)) * (length // 256) + bytes(length % 256), b"", b"last"]
    with ThreadPoolExecutor() as threads:
        received = threads.submit(lambda: [there.receive() for _ in messages])
        for message in messages:
            here.send(message)
        assert received.result(timeout=PATIENCE) == messages


def test_a_length_that_no_rank_sends_is_refused() -> None:
    here, there = connected()
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    frame[:LENGTH_BYTES] = torch.tensor(list((MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES, "little")))
    with ThreadPoolExecutor() as threads:
        received = threads.submit(there.receive)
        here._group.send([frame], 1, 0).wait()
        with pytest.raises(RuntimeError, match="a message of 268435457 bytes from rank 0"):
            received.result(timeout=PATIENCE)


class Recorder:
    """A target that only remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.answer = Verified(logits=torch.tensor([1]))

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        self.calls.append(("reserve", slot, list(pages), num_tokens))

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        self.calls.append([with_taps, *((s.slot, list(s.token_ids), s.num_logits) for s in segments)])
        return self.answer

    def rollback(self, slot: int, num_tokens: int) -> None:
        self.calls.append(("rollback", slot, num_tokens))

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))


class LeadingRecorder(ShardedTarget):
    """Rank 0's, which has no model."""

    def __init__(self, shard: Any, leader: Leader) -> None:
        self._shard, self._leader, self._later = shard, leader, []


SLOTS = st.integers(0, 63)
TOKENS = st.integers(0, 2**31)
COUNTS = st.integers(0, 9)
SEGMENTS = st.builds(
    lambda slot, token_ids, num_logits: Segment(slot=slot, token_ids=token_ids, num_logits=num_logits),
    SLOTS,
    st.lists(TOKENS, min_size=1, max_size=9) | st.builds(range, COUNTS),
    COUNTS,
)
CALLS = st.one_of(
    st.tuples(st.just("reserve"), SLOTS, st.lists(TOKENS), COUNTS.map(np.int64)),
    st.tuples(st.just("verify"), st.lists(SEGMENTS, min_size=1), st.booleans()),
    st.tuples(st.just("rollback"), SLOTS, COUNTS),
    st.tuples(st.just("release"), SLOTS),
)


@given(st.lists(CALLS, max_size=6))
@settings(max_examples=10)
def test_a_follower_does_what_rank_0_does(calls: list[tuple[Any, ...]]) -> None:
    here, there = Recorder(), Recorder()
    with pair_of_ranks() as (leader, follower), ThreadPoolExecutor() as threads:
        target = LeadingRecorder(here, leader)
        following = threads.submit(follow, follower, there)  # type: ignore[arg-type]
        for name, *arguments in [*calls, ("verify", [Segment(slot=0, token_ids=[1], num_logits=1)], False)]:
            if name == "verify":
                assert target.verify(arguments[0], with_taps=arguments[1]) is here.answer
            else:
                getattr(target, name)(*arguments)
        stopping = threads.submit(leader.shutdown)
        with pytest.raises(Followed):
            following.result(timeout=PATIENCE)
        follower.finish()
        stopping.result()
    assert there.calls == here.calls
    assert len(here.calls) == len(calls) + 1


def test_no_thread_outlives_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[type, list[threading.Thread]] = {Leader: [], Follower: []}

    def linger(role: type, name: str, seconds: float) -> None:
        method = getattr(role, name)

        def lingering(*arguments: object) -> None:
            threads[role].append(threading.current_thread())
            method(*arguments)
            time.sleep(seconds)

        monkeypatch.setattr(role, name, lingering)

    linger(Leader, "_read", 0.1)
    linger(Leader, "_watch", 0.3)
    linger(Follower, "_read", 0.6)
    with pair_of_ranks() as (leader, follower), ThreadPoolExecutor() as pool:
        shut_down = pool.submit(leader.shutdown)
        assert follower.receive() is None
        finished = pool.submit(follower.finish)
        shut_down.result()
        assert [thread.is_alive() for thread in threads[Leader]] == [False, False]
        finished.result()
        assert [thread.is_alive() for thread in threads[Follower]] == [False]


@contextmanager
def pair_of_ranks() -> Iterator[tuple[Leader, Follower]]:
    """Rank 0 and rank 1 that have found the same facts."""
    here, there = connected()
    leader, follower = Leader({1: here}), Follower(1, 2, there)
    verifying = threading.Thread(target=follower.verify_same_facts, args=({"engine": "A"},))
    verifying.start()
    leader.verify_same_facts({"engine": "A"})
    verifying.join()
    yield leader, follower


SCRIPTS = f"{sys.prefix}/bin"
LAUNCHER_COMMANDS = {
    "torchrun": [f"{SCRIPTS}/torchrun", "--nproc-per-node", "2"],
    "mpiexec": [f"{SCRIPTS}/mpiexec", "-n", "2", sys.executable],
}


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHER_COMMANDS)
def test_a_launcher_that_is_killed_leaves_no_rank_behind(launcher: str) -> None:
    command = [*LAUNCHER_COMMANDS[launcher], "-m", "tests.runtime.ranks.script", "2", "wait"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        until(lambda: not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks))


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHER_COMMANDS)
def test_launchers(launcher: str) -> None:
    """Two ranks, each started as a user starts it."""
    command = [*LAUNCHER_COMMANDS[launcher], "-m", "tests.runtime.ranks.script", "2", "add"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (result.stdout, result.returncode) == ("3 1 lo\n", 0), result.stderr
    assert "Traceback" not in result.stderr
