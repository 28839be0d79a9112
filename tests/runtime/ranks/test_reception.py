# SPDX-License-Identifier: Apache-2.0
"""Rank 0 and the other ranks find each other, whoever else calls."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dflash_trt.errors import RankError
from dflash_trt.launch_environment import Launch
from dflash_trt.runtime.ranks import reception
from dflash_trt.runtime.ranks.key import fresh_key, given_key, key_file, read_key_file
from dflash_trt.runtime.ranks.link import Link
from dflash_trt.runtime.ranks.meeting import Meeting
from dflash_trt.runtime.ranks.reception import MAX_WAITING
from tests.runtime.ranks.strangers import Strangers

KEY = bytes(range(32))
TORCHRUN = Launch(1, 2, by_mpiexec=False)
LIMIT_SECONDS = 15.0


@pytest.fixture(autouse=True)
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that does not succeed ends, so that the test does."""
    monkeypatch.setattr(reception, "START_SECONDS", LIMIT_SECONDS)


class Store:
    """The store of torch.distributed for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout=10)
            return self._values[key]

    @property
    def port(self) -> int:
        return int(self.get("dflash_trt/link").split()[0])


class Start:
    """Rank 0 waits for the others in one thread, and they call from others."""

    def __init__(self, key: bytes | None, size: int, threads: ThreadPoolExecutor) -> None:
        self.store = Store()
        self._threads = threads
        self._meeting = Meeting(self.store, "127.0.0.1", key)
        self._leading = threads.submit(self._meeting.link_followers, size)
        self._following: dict[int, Future[Link]] = {}

    def call(self, *ranks: int) -> None:
        """These ranks call, and are let in."""
        for rank in ranks:
            self._following[rank] = self._threads.submit(self._meeting.link_leader, rank)
        for rank in ranks:
            self._following[rank].result(timeout=LIMIT_SECONDS)

    def call_silently(self) -> socket.socket:
        """Somebody who connects and says nothing."""
        return socket.create_connection(("127.0.0.1", self.store.port), timeout=LIMIT_SECONDS)

    def finish(self) -> None:
        """Rank 0's links lead to the ranks that called, and to nobody else."""
        links = self._leading.result(timeout=LIMIT_SECONDS)
        assert list(links) == sorted(self._following)
        for rank, future in self._following.items():
            follower = future.result()
            follower.send(b"from %d" % rank)
            assert links[rank].receive() == b"from %d" % rank
            links[rank].send(b"to %d" % rank)
            assert follower.receive() == b"to %d" % rank


@contextmanager
def start(key: bytes | None, size: int) -> Iterator[Start]:
    with ThreadPoolExecutor() as threads:
        yield Start(key, size, threads)


@pytest.mark.parametrize("key", [None, KEY])
def test_links_are_by_rank(key: bytes | None) -> None:
    with start(key, 4) as ranks:
        ranks.call(3, 1, 2)
        ranks.finish()


def test_the_key_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with start(None, 2) as ranks:
        published = ranks.store.get("dflash_trt/link")
        (file,) = tmp_path.iterdir()
        assert published == f"{ranks.store.port} {file}".encode()
        assert (file.stat().st_mode & 0o777, file.stat().st_size) == (0o600, 32)
        ranks.call(1)
        ranks.finish()
    assert list(tmp_path.iterdir()) == [], "expected the key to go when all ranks have it"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_strangers_are_not_heard(seed: int) -> None:
    """Each way of calling, in a random order, before, between and after the ranks, and with two floods."""
    stop = threading.Event()
    with start(KEY, 5) as ranks:
        strangers = Strangers(ranks.store.port, KEY, seed)
        floods = [threading.Thread(target=strangers.flood, args=(stop,)) for _ in range(2)]
        try:
            ranks.call(1)
            for way in strangers.ways:
                strangers.call_as(way)
            strangers.call(150)
            ranks.call(3)
            for flood in floods:
                flood.start()
            ranks.call(4)
            strangers.call(50)
            ranks.call(2)
            ranks.finish()
        finally:
            stop.set()
            for flood in floods:
                if flood.is_alive():
                    flood.join()
            strangers.leave()
    assert strangers.heard == []


def test_silent_callers_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as many as may wait, and none of them runs out of time."""
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 10 * LIMIT_SECONDS)
    with start(KEY, 3) as ranks, ExitStack() as open_connections:
        silent = [ranks.call_silently() for _ in range(3 * MAX_WAITING)]
        for connected in silent:
            open_connections.enter_context(connected)
        ranks.call(1, 2)
        ranks.finish()
        for connected in silent:
            with suppress(ConnectionResetError):
                while connected.recv(100):  # until rank 0 has hung up
                    pass


def test_a_silent_caller_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 0.2)
    with start(KEY, 2) as ranks, ranks.call_silently() as silent:
        assert len(silent.recv(100)) > 20, "expected a challenge"
        assert silent.recv(100) == b"", "expected rank 0 to hang up"
        ranks.call(1)
        ranks.finish()


def test_a_rank_with_another_key_is_told() -> None:
    with start(KEY, 2) as ranks:
        other = Meeting(ranks.store, "127.0.0.1", fresh_key())
        with pytest.raises(RankError, match="rank 1: expected the key that rank 0 has, found: digest sent"):
            other.link_leader(1)
        ranks.call(1)
        ranks.finish()


def test_rank_0_must_know_the_key_too() -> None:
    """Who poses as rank 0 can send a challenge, and cannot answer one."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        calling = threads.submit(reception.call_leader, "127.0.0.1", server.getsockname()[1], KEY, 1)
        link = Link(server.accept()[0])
        link.send(b"#CHALLENGE#" + bytes(20))
        link.receive()
        link.send(b"#WELCOME#")
        assert link.receive().startswith(b"#CHALLENGE#")
        link.send(bytes(16))
        with pytest.raises(RankError, match="expected the key that rank 0 has"):
            calling.result(timeout=LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("rank", "reason"), [(1, "rank 1: expected one process, found a second"), (7, "expected one of the ranks 1 to 2")]
)
def test_a_rank_that_is_not_missing_is_told(rank: int, reason: str) -> None:
    with start(KEY, 3) as ranks:
        ranks.call(1)
        with pytest.raises(RankError, match=f"rank 0 refuses rank {rank}: {reason}"):
            Meeting(ranks.store, "127.0.0.1", KEY).link_leader(rank)
        ranks.call(2)
        ranks.finish()


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "START_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(RankError) as caught:
            reception.receive_followers(server, KEY, 3)
        assert caught.value.message == "ranks 1, 2: expected them to connect within 0 s, found none that knows the key"
        assert caught.value.hint is not None
        assert "DFLASH_TRT_RANKS_KEY" in caught.value.hint


def test_no_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RankError, match=f"rank 0: expected it to listen at 127.0.0.1 port {port}, found: .*refused"):
        reception.call_leader("127.0.0.1", port, KEY, 1)


ONE_HOST = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}
TWO_HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node-1"}
SECRET = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("launch", "environment", "expected"),
    [
        (TORCHRUN, ONE_HOST, None),
        (TORCHRUN, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None),
        (TORCHRUN, TWO_HOSTS | {"DFLASH_TRT_RANKS_KEY": SECRET}, SECRET.encode()),
        (TORCHRUN, ONE_HOST | {"DFLASH_TRT_RANKS_KEY": SECRET}, SECRET.encode()),
        (Launch(1, 2, by_mpiexec=True), {}, None),
    ],
)
def test_where_the_key_comes_from(launch: Launch, environment: dict[str, str], expected: bytes | None) -> None:
    assert given_key(launch, environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TWO_HOSTS, "ranks on several hosts: expected their key in DFLASH_TRT_RANKS_KEY, found none"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}, "ranks on several hosts: expected their key"),
        (
            ONE_HOST | {"DFLASH_TRT_RANKS_KEY": "guess"},
            "expected at least 32 characters, found 5",
        ),
    ],
)
def test_a_key_that_is_needed(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        given_key(TORCHRUN, environment)
    assert caught.value.hint is not None
    assert "openssl rand -hex 32" in caught.value.hint


def test_a_key_file() -> None:
    with key_file(KEY) as file:
        assert read_key_file(file) == KEY
    with pytest.raises(RankError, match="expected the key of rank 0, found: No such file"):
        read_key_file(file)


def test_key_files_that_others_could_have_made(tmp_path: Path) -> None:
    """Their name comes through a store that is open to all."""
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o640)
    with pytest.raises(RankError, match="expected a file that only this user may open"):
        read_key_file(file)
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(RankError, match="expected the key of rank 0, found: Too many levels"):
        read_key_file(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(RankError, match="expected a file that only this user may open"):
        read_key_file(tmp_path / "fifo")
    file.write_bytes(b"short")
    with pytest.raises(RankError, match="expected a key of 32 bytes, found 5"):
        read_key_file(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_key_file_of_another_user(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    os.chown(file, 12345, 12345)
    with pytest.raises(RankError, match="expected a file that only this user may open"):
        read_key_file(file)
