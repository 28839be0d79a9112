# SPDX-License-Identifier: Apache-2.0
"""Machine code of a GPU: compiled, its basic blocks, and the cheapest ways around a loop and to an end."""

from __future__ import annotations

import heapq
import importlib.metadata
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)(.*)$")
TARGET = re.compile(r"\.L_x_\d+")
JUMPS = ("BRA", "BRX", "JMP", "EXIT", "RET")

# The first that matches an opcode's beginning is where it is executed.
PIPES = {
    "MMA": ("HMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "UTC"),
    "MUFU": ("MUFU",),
    "load/store": ("LD", "ST", "DEPBAR", "SYNCS", "ATOM", "RED", "UBLKCP", "UTMA", "MATCH", "SHFL"),
    "control": ("BRA", "BRX", "BSSY", "BSYNC", "BREAK", "BMOV", "BAR", "WARPSYNC", "NOP", "EXIT", "CALL", "RET",
                "VOTE", "YIELD", "NANOSLEEP", "ERRBAR", "MEMBAR", "JMP", "ELECT", "BPT"),
    "uniform": ("U", "S2UR", "R2UR", "CS2UR"),
    "convert": ("F2", "I2F", "FRND"),
    "FMA": ("FFMA", "FADD", "FMUL", "IMAD", "HFMA", "HADD", "HMUL"),
    "ALU": ("",),
}  # fmt: skip


State = tuple[int, tuple[int, ...]]  # a block, and what was issued before it


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another, and the blocks that may follow."""

    opcodes: tuple[str, ...]
    following: tuple[int, ...]

    def count(self, prefix: str) -> int:
        return sum(opcode.startswith(prefix) for opcode in self.opcodes)


@dataclass(frozen=True)
class Code:
    """One kernel's."""

    blocks: list[Block]
    nbytes: int  # padding included
    registers: int


def find(tool: str, hint: str) -> str:
    """The program's path: of its PyPI wheel, or on the PATH."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{tool}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((str(f.locate()) for f in files if f.name == tool), None) or shutil.which(tool)
    if found is None:
        raise click.ClickException(f"expected {tool} on the PATH, found none: {hint}")
    return found


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise click.ClickException(f"{' '.join(command[:2])} ...: {result.stderr}")
    return result.stdout + result.stderr


def compile_kernels(source: Path, architecture: str, include: Path) -> dict[str, Code]:
    """All kernels of a .cu file, by their mangled names."""
    cubin = source.with_suffix(".cubin")
    code = f"--generate-code=arch=compute_{architecture},code=sm_{architecture}"
    nvcc = find("nvcc", "install the CUDA toolkit")
    ptxas = run(nvcc, "-std=c++20", "-cubin", code, f"-I{include}", "-Xptxas=-v", str(source), "-o", str(cubin))
    registers = dict(re.findall(r"entry function '(\w+)'(?:.*\n)+?.*Used (\d+) registers", ptxas))
    text = run(find("nvdisasm", "pip install 'nvidia-cuda-nvdisasm>=13'"), "-c", str(cubin))
    sections = re.split(r"\.section\s+\.text\.(\w+),", text)[1:]
    return {
        name: Code(parse(listing), last_offset(listing) + 16, int(registers[name]))
        for name, listing in zip(sections[::2], sections[1::2], strict=True)
    }


def pipe(opcode: str) -> str:
    return next(name for name, prefixes in PIPES.items() if opcode.startswith(prefixes))


def last_offset(text: str) -> int:
    return max(int(offset, 16) for offset in re.findall(r"/\*([0-9a-f]{4,5})\*/", text))


def parse(text: str) -> list[Block]:
    """The basic blocks of the one kernel in a part of `nvdisasm -c`'s text."""
    groups: list[tuple[list[str], list[tuple[str, str, str]]]] = [([], [])]  # labels, instructions
    for line in text.splitlines():
        if label := LABEL.match(line):
            if groups[-1][1]:
                groups.append(([], []))
            groups[-1][0].append(label[1])
        elif found := INSTRUCTION.match(line):
            guard, opcode, operands = found[1] or "", found[2], found[3]
            groups[-1][1].append((guard, opcode, operands))
            if opcode.startswith(JUMPS):
                groups.append(([], []))
    groups = [group for group in groups if group[1]]
    at = {label: i for i, (labels, _) in enumerate(groups) for label in labels}
    return [
        Block(tuple(op for _, op, _ in code), tuple(_following(code[-1], i, at))) for i, (_, code) in enumerate(groups)
    ]


def _following(last: tuple[str, str, str], index: int, at: Mapping[str, int]) -> Iterator[int]:
    guard, opcode, operands = last
    if opcode.startswith(("BRA", "BRX", "JMP")):
        yield from (at[label] for label in TARGET.findall(operands) if label in at)
    # "BRA P3, `(.L_x_1)" and "BRA.DIV UR4, ..." go on where their operand says no.
    conditional = guard not in ("", "@PT", "@UPT") or re.match(r"\s*!?U?[PR]\w+\s*,", operands)
    if not opcode.startswith(JUMPS) or (conditional and not opcode.startswith("BRX")):
        yield index + 1


def cheapest_round(blocks: list[Block], exactly: Mapping[str, int], at_least: Mapping[str, int]) -> Counter[str]:
    """The opcodes of the shortest walk from a block back to itself that issues these numbers of instructions.

    This is one turn of the loop without rare events: opcode prefixes name the required instructions, and each branch
    takes the way with the fewest instructions. Raises ValueError if there is no such walk.
    """
    prefixes = [*exactly, *at_least]
    most = [*exactly.values(), *at_least.values()]
    counts = [tuple(block.count(prefix) for prefix in prefixes) for block in blocks]
    anchor = next(iter(exactly))
    best: tuple[int, list[int]] | None = None
    for start, block in enumerate(blocks):
        if block.count(anchor) == 0:
            continue
        found = _walk(blocks, counts, start, most, len(exactly), best[0] if best else None)
        best = found or best
    if best is None:
        raise ValueError(f"no loop issues {dict(exactly)} and at least {dict(at_least)}")
    return Counter(opcode for i in best[1] for opcode in blocks[i].opcodes)


def cheapest_path(blocks: list[Block], sequence: Sequence[str]) -> list[int]:
    """The blocks of the shortest walk from the kernel's first instruction to an end that issues, in this order, what
    begins with these prefixes, whatever it issues between them.

    A lower bound of what runs: work that no prefix names is left out where a branch allows it. Raises ValueError if
    there is no such walk.
    """
    begin = (0, 0)
    came: dict[tuple[int, int], tuple[int, int]] = {}
    cost = {begin: 0}
    queue = [(0, begin)]
    while queue:
        so_far, state = heapq.heappop(queue)
        if so_far > cost[state]:
            continue
        block, done = state
        for opcode in blocks[block].opcodes:
            done += done < len(sequence) and opcode.startswith(sequence[done])
        if done == len(sequence) and blocks[block].opcodes[-1] == "EXIT":
            path = [block]
            while state in came:
                state = came[state]
                path.append(state[0])
            return path[::-1]
        total = so_far + len(blocks[block].opcodes)
        for target in blocks[block].following:
            following = (target, done)
            if target < len(blocks) and total < cost.get(following, 1 << 60):
                cost[following] = total
                came[following] = state
                heapq.heappush(queue, (total, following))
    raise ValueError(f"no path issues {', '.join(map(str, Counter(sequence).items()))}")


def _walk(
    blocks: list[Block], counts: list[tuple[int, ...]], start: int, most: list[int], exact: int, below: int | None
) -> tuple[int, list[int]] | None:
    """Dijkstra over (block, what was issued so far): the cost, and the blocks in order."""
    begin: State = (start, (0,) * len(most))
    goal = tuple(most)
    came: dict[State, State] = {}
    cost = {begin: 0}
    queue: list[tuple[int, State]] = [(0, begin)]
    while queue:
        so_far, state = heapq.heappop(queue)
        if so_far > cost[state]:
            continue
        if below is not None and so_far >= below:
            return None
        block, issued = state
        if block == start and issued == goal:
            path = []
            while state in came:
                state = came[state]
                path.append(state[0])
            return so_far, path[::-1]
        done = [a + b for a, b in zip(issued, counts[block], strict=True)]
        if any(done[i] > most[i] for i in range(exact)):
            continue
        then = tuple(min(a, b) for a, b in zip(done, most, strict=True))
        for target in blocks[block].following:
            following: State = (target, then)
            total = so_far + len(blocks[block].opcodes)
            if target < len(blocks) and total < cost.get(following, 1 << 60):
                cost[following] = total
                came[following] = state
                heapq.heappush(queue, (total, following))
    return None
