# SPDX-License-Identifier: Apache-2.0
"""Policy of whose request comes next: clients take turns, and running requests leave for a client with fewer."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar


class OfClient(Protocol):
    """A request, as far as this policy reads it."""

    client: str
    """Sender: the digest of an API key, an address, or "" where there is only one."""


R = TypeVar("R", bound=OfClient)


class ClientQueue(Generic[R]):
    """Waiting requests: clients take turns (round-robin), each one's requests in the order of arrival."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[R]] = OrderedDict()
        """Waiting requests of each client that has any; the first client's turn is next."""

    def __iter__(self) -> Iterator[R]:
        return chain.from_iterable(self._clients.values())

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def heads(self, running: Iterable[R]) -> list[R]:
        """The first request of each client, beginning with the client that has the fewest `running`."""
        counts = Counter(request.client for request in running)
        return sorted((requests[0] for requests in self._clients.values()), key=lambda head: counts[head.client])

    def append(self, request: R) -> None:
        """Queues a request after its client's others."""
        self._clients.setdefault(request.client, deque()).append(request)

    def put_back(self, request: R) -> None:
        """Queues a request that ran already before its client's others."""
        self._clients.setdefault(request.client, deque()).appendleft(request)

    def take(self, request: R) -> None:
        """Removes a client's first request; the client's next turn comes after everyone else's."""
        self.remove(request)
        if request.client in self._clients:
            self._clients.move_to_end(request.client)

    def remove(self, request: R) -> None:
        """Removes a request."""
        requests = self._clients[request.client]
        requests.remove(request)
        if not requests:
            del self._clients[request.client]

    def clear(self) -> None:
        """Removes all requests."""
        self._clients.clear()


def to_preempt(running: Sequence[R], client: str) -> R | None:
    """The request that leaves its slot to one of `client`: the latest of the client with most; None if that is unfair.

    It is fair if the other client still has no fewer than this one afterwards, so no two requests displace each other
    in turn. `running` is in the order of admission.
    """
    counts = Counter(request.client for request in running)
    most = max(counts, key=lambda each: counts[each], default=client)
    if counts[most] < counts[client] + 2:
        return None
    return next(request for request in reversed(running) if request.client == most)


def split_room(room: int, needs: Sequence[tuple[str, int]]) -> list[int]:
    """Shares of `room` tokens, one for each of `needs` (client, tokens): equal for all clients, unused ones passed on.

    Within a client's share, requests are served in order.
    """
    totals = Counter[str]()
    for client, need in needs:
        totals[client] += need
    left = dict[str, int]()
    for num_served, (client, total) in enumerate(sorted(totals.items(), key=lambda item: item[1])):
        left[client] = min(total, -(-room // (len(totals) - num_served)))
        room -= left[client]
    shares = []
    for client, need in needs:
        shares.append(min(need, left[client]))
        left[client] -= shares[-1]
    return shares
