# SPDX-License-Identifier: Apache-2.0
"""Who am I, who are the others, and how do we talk: with one process, or with threads for ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import RankError
from dflash_trt.launch_environment import Launch, read_launch
from dflash_trt.runtime.ranks.join import _backend, join
from dflash_trt.runtime.ranks.link import Link
from dflash_trt.runtime.ranks.parallel_pair import TensorParallelPair, follow
from dflash_trt.runtime.ranks.roles import LINGER_SECONDS, Follower, Leader, _cause, _disagreement
from dflash_trt.targets.target import Segment
from tests.paths import REPOSITORY

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


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(RankError, match="expected whole numbers, found RANK=one, WORLD_SIZE=2"):
        read_launch({"RANK": "one", "WORLD_SIZE": "2"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_joins_nobody(alone: pytest.MonkeyPatch) -> None:
    with join(1) as ranks:
        ranks.agree({"engine": "A"})
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
    assert (_backend("auto"), bound) == ("cpu:gloo,cuda:nccl", [3])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(RankError, match="expected a GPU for each of the 8 ranks on this host, found 4"):
        _backend("auto")
    assert _backend("cpu") == "gloo"


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("2", 2)])
def test_a_rank_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(3)
    _backend("cpu")
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
    assert _disagreement(expected, found) == verdict


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        ({2: "an error"}, "rank 2: an error"),
        ({2: "stumbled", 1: None, 3: "stumbled"}, "rank 1: expected it to work until rank 0 has finished, found that"
         " its process was killed"),
        ({3: "first", 1: "second"}, "rank 3: first"),
    ],
)  # fmt: skip
def test_who_was_killed_goes_before_who_stumbled(reports: dict[int, str | None], cause: str) -> None:
    assert _cause(reports) == cause


def test_a_message_arrives_whole() -> None:
    here, there = (Link(end) for end in connected())
    message = bytes(range(256)) * 20_000  # more than a socket takes at once
    sender = threading.Thread(target=here.send, args=(message,))
    sender.start()
    assert there.receive() == message
    sender.join()
    here.send(b"")
    assert there.receive() == b""
    here.send(bytes(9))
    with pytest.raises(OSError, match="bad message length"):
        there.receive(8)
    here, there = (Link(end) for end in connected())
    here.end()
    with pytest.raises(OSError, match="gone"):
        there.receive()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


class Recorder:
    """A pair that only remembers what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        self.calls: list[object] = []
        self._answer = answer

    def draft(self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int) -> list[list[int]]:
        self.calls.append(("draft", list(slots), list(anchors), num_tokens))
        return self._answer

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.calls.append([(s.slot, list(s.token_ids), s.num_logits) for s in segments])
        return self._answer

    def commit(self, num_tokens: Sequence[int]) -> None:
        self.calls.append(("commit", list(num_tokens)))

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))


SLOTS = st.integers(0, 63)
TOKENS = st.integers(0, 2**31)
SEGMENTS = st.builds(
    lambda slot, token_ids, num_logits: Segment(slot=slot, token_ids=token_ids, num_logits=num_logits),
    SLOTS,
    st.lists(TOKENS, min_size=1, max_size=9),
    st.integers(0, 9),
)
CALLS = st.one_of(
    st.tuples(
        st.just("draft"),
        st.lists(st.tuples(SLOTS, TOKENS), min_size=1).map(lambda p: [*zip(*p, strict=True), len(p)]),
    ),
    st.tuples(st.just("verify"), st.lists(SEGMENTS, min_size=1).map(lambda segments: [segments])),
    st.tuples(st.just("commit"), st.lists(st.integers(0, 99), min_size=1).map(lambda counts: [counts])),
    st.tuples(st.just("release"), SLOTS.map(lambda slot: [slot])),
)


@given(st.lists(st.tuples(st.integers(0, 1), CALLS), max_size=6))
@settings(deadline=None)
def test_a_follower_does_what_rank_0_does(calls: list[tuple[int, tuple[str, list[object]]]]) -> None:
    answer = torch.tensor([1])
    here, there = ([Recorder(answer), Recorder(answer)] for _ in range(2))
    with pair_of_ranks() as (leader, follower):
        pairs = [TensorParallelPair(leader, pair, index) for index, pair in enumerate(here)]
        following = threading.Thread(target=follow, args=(follower, there), daemon=True)
        following.start()
        for index, (name, arguments) in calls:
            assert getattr(pairs[index], name)(*arguments) is (answer if name in ("draft", "verify") else None)
        stop = threading.Thread(target=leader.dismiss)
        stop.start()
        following.join(timeout=10)
        assert not following.is_alive()
        follower.leave()
        stop.join()
    assert [pair.calls for pair in there] == [pair.calls for pair in here]


class pair_of_ranks:  # noqa: N801
    """Rank 0 and rank 1 that have agreed."""

    def __enter__(self) -> tuple[Leader, Follower]:
        self._ends = connected()
        here, there = (Link(end) for end in self._ends)
        leader, follower = Leader({1: here}), Follower(1, 2, there)
        agreeing = threading.Thread(target=follower.agree, args=({"engine": "A"},))
        agreeing.start()
        leader.agree({"engine": "A"})
        agreeing.join()
        return leader, follower

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpiexec", marks=pytest.mark.full)])
def test_launchers(launcher: str) -> None:
    """Two ranks, each started as a user starts it."""
    scripts = f"{sys.prefix}/bin"
    ranks = {"torchrun": [f"{scripts}/torchrun", "--nproc-per-node", "2"],
             "mpiexec": [f"{scripts}/mpiexec", "-n", "2", sys.executable]}[launcher]  # fmt: skip
    command = [*ranks, "-m", "tests.runtime.ranks.script", "2", "add"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.returncode) == ("3 1 lo\n", 0), result.stderr
    assert "Traceback" not in result.stderr
