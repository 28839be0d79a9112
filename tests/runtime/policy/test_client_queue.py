# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.policy.client_queue import ClientQueue, split_room, to_preempt


@dataclass(eq=False)
class Asked:
    client: str
    number: int = 0


def queue(clients: str) -> ClientQueue[Asked]:
    made = ClientQueue[Asked]()
    for number, client in enumerate(clients):
        made.append(Asked(client, number))
    return made


def served(waiting: ClientQueue[Asked]) -> str:
    """Clients in the order of their turns, if each request ends before the next one is taken."""
    order = ""
    while waiting:
        head = waiting.heads([])[0]
        waiting.take(head)
        order += head.client
    return order


def test_clients_take_turns() -> None:
    assert served(queue("aaaabcb")) == "abcabaa"
    assert served(queue("aaa")) == "aaa"


def test_a_clients_requests_keep_their_order() -> None:
    waiting = queue("ababa")
    back = Asked("a", -1)
    waiting.put_back(back)
    assert [each.number for each in waiting if each.client == "a"] == [-1, 0, 2, 4]
    assert len(waiting) == 6
    waiting.remove(next(each for each in waiting if each.number == 2))
    assert [each.number for each in waiting] == [-1, 0, 4, 1, 3]
    waiting.clear()
    assert not waiting
    assert waiting.heads([]) == []


def test_a_client_with_fewer_running_requests_is_next() -> None:
    running = [Asked("a"), Asked("a"), Asked("b")]
    assert [head.client for head in queue("abc").heads(running)] == ["c", "b", "a"]


def test_the_latest_of_the_client_with_most_leaves() -> None:
    running = [Asked("a", 1), Asked("b", 2), Asked("a", 3), Asked("a", 4), Asked("b", 5)]
    leaving = to_preempt(running, "c")
    assert leaving is not None
    assert leaving.number == 4
    assert to_preempt(running, "b") is None, "3 against 2: it would be displaced in turn"
    assert to_preempt(running, "a") is None
    assert to_preempt([], "a") is None
    assert to_preempt([Asked("a")], "b") is None, "the only slot is not taken away"


NEEDS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=8)


@given(NEEDS, st.integers(0, 100))
def test_room_is_split_evenly(needs: list[tuple[str, int]], room: int) -> None:
    shares = split_room(room, needs)
    totals, given_to = Counter[str](), Counter[str]()
    for (client, need), share in zip(needs, shares, strict=True):
        assert 0 <= share <= need
        totals[client] += need
        given_to[client] += share
    assert sum(shares) == min(room, totals.total()), "all of it is used"
    short = [given_to[client] for client in totals if given_to[client] < totals[client]]
    assert not short or max(short) - min(short) <= 1
    assert all(given_to[client] <= min(short, default=100) + 1 for client in totals)


def test_a_clients_oldest_prompt_is_read_first() -> None:
    assert split_room(10, [("a", 7), ("a", 7)]) == [7, 3]
    assert split_room(10, [("a", 700), ("b", 2), ("a", 5)]) == [8, 2, 0]
    assert split_room(0, [("a", 1)]) == [0]
