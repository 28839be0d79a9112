# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's own command of one node of a server on several: the same on each, but for its rank.

vLLM 0.33.0 (engine/arg_utils.py, config/parallel.py): --nnodes, --node-rank, --master-addr, and --headless where no
HTTP is served. SGLang 0.5.23 (srt/arg_groups/fields/parallel.py): --nnodes, --node-rank, --dist-init-addr.
"""

from __future__ import annotations

import msgspec

from dflash_trt.deploy.cluster.cluster_server import ClusterServer
from dflash_trt.deploy.render import Rendered
from dflash_trt.files.command import command_line

PORT = 29501
"""Where nodes meet: vLLM's own default, given to SGLang too."""
RANK, LEADER = "NODE_RANK", "LEADER"
"""Variables of a script that people start on each node."""


def node_command(server: ClusterServer, *, rank: str, leader: str) -> str:
    """One line of shell for each node; `rank` and `leader` are names of variables. One node's is the plain command."""
    command = command_line(server.words)
    if server.nodes == 1:
        return f"exec {command}"
    others, flags = _joined(server.runtime, server.nodes, rank, leader)
    return "; ".join([*others, f"exec {command} {flags}"])


def node_script(rendered: Rendered, runtime: str, nodes: int) -> Rendered:
    """A server on `nodes` of them as a script that is started on each, with its rank and the first one's address."""
    head, _, command = rendered.text.partition("\n")
    others, flags = _joined(runtime, nodes, RANK, LEADER)
    where = f"# On each of {nodes} nodes: {RANK}=0 {LEADER}=ADDRESS sh FILE; the first is 0, and has the address."
    asked = f': "${{{RANK}:?0 on the first node, 1 on the next}}" "${{{LEADER}:?address of the first node}}"'
    text = "\n".join([head, where, asked, *others, f"exec {command.rstrip()} \\\n  {flags}", ""])
    return msgspec.structs.replace(rendered, text=text, start=f"{RANK}=0 {LEADER}=ADDRESS sh FILE")


def _joined(runtime: str, nodes: int, rank: str, leader: str) -> tuple[list[str], str]:
    """What a node does before the command, and the flags behind it."""
    flags = f'--nnodes {nodes} --node-rank "${rank}"'
    if runtime == "sglang":
        return [], f'{flags} --dist-init-addr "${leader}:{PORT}"'
    others = f'if [ "${rank}" -gt 0 ]; then set -- --headless; fi'
    return [others], f'{flags} --master-addr "${leader}" --master-port {PORT} "$@"'
