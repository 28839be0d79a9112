# SPDX-License-Identifier: Apache-2.0
"""Hosts of a network of their own: Linux network namespaces on one bridge, each cable of which can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.runtime.dynamo.cluster import Host

SUBNET = "10.213.47"


class Network:
    """`hosts[i]` is a namespace; the test itself is on the bridge, too."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.hosts = [Host(f"{SUBNET}.{i + 1}", ("ip", "netns", "exec", name)) for i, name in enumerate(names)]

    @contextmanager
    def partition(self, index: int) -> Iterator[None]:
        """Nothing reaches the host, and nothing leaves it; its processes and addresses stay."""
        _ip("link", "set", self._names[index], "down")
        try:
            yield
        finally:
            _ip("link", "set", self._names[index], "up")


@contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Skips the test where this user may not make namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2's ip, and root")
    bridge, names = f"dfb{os.getpid()}", [f"df{i}-{os.getpid()}" for i in range(num_hosts)]
    with ExitStack() as made:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel or container allows no bridge: {error.stderr.strip()}")
        made.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{SUBNET}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "delete", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            made.callback(_ip, "link", "delete", name)
            _ip("link", "set", name, "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield Network(names)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
