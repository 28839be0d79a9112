# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's own command of one node of a server on several: the same on each, but for its rank.

vLLM 0.33.0 (engine/arg_utils.py, config/parallel.py): --nnodes, --node-rank, --master-addr, and --headless where no
HTTP is served. SGLang 0.5.23 (srt/arg_groups/fields/parallel.py): --nnodes, --node-rank, --dist-init-addr.
"""

from __future__ import annotations

from dflash_trt.deploy.cluster.cluster_server import ClusterServer
from dflash_trt.files.command import command_line

PORT = 29501
"""Where nodes meet: vLLM's own default, given to SGLang too."""


def node_command(server: ClusterServer, *, rank: str, leader: str) -> str:
    """One line of shell for each node; `rank` and `leader` are names of variables. One node's is the plain command."""
    command = command_line(server.words)
    if server.nodes == 1:
        return f"exec {command}"
    nodes = f'--nnodes {server.nodes} --node-rank "${rank}"'
    if server.runtime == "sglang":
        return f'exec {command} {nodes} --dist-init-addr "${leader}:{PORT}"'
    others = f'if [ "${rank}" -gt 0 ]; then set -- --headless; fi'
    return f'{others}; exec {command} {nodes} --master-addr "${leader}" --master-port {PORT} "$@"'
