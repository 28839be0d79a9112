# SPDX-License-Identifier: Apache-2.0
"""Damages what readers read: at random, or with what has hurt readers before."""

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**400, 10**4000, 0.5, -0.0, 1e-320,
    1e308, float("nan"), float("inf"), "", "0", "a", "\0", "\x1b[2J", "\ud800", "\u202e", "a\nb", "a" * 10_000, "../x",
    "/etc/passwd", "x.safetensors", "model.safetensors", "BF16", "F8_E4M3", "FP8", "NVFP4", "gpt_oss", "qwen3", "yarn",
    [], {}, [[]], [0], [-1], [2**62] * 300, [1] * 20_000, ["full_attention"], ["DFlashDraftModel"], {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 1e308}, {"quant_algo": "FP8"}, {"": None},
]  # fmt: skip
NASTY_BYTES = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", b"\r", b"\t", b"[" * 5000, b'{"a":' * 500,
    b"9" * 5000, b"-", b"1e999", b"NaN", b"-Infinity", b'"\\ud800"', b'"\\u001b"', b",", b":", b'"', b"{}", b"[]",
    b"0x" + b"f" * 6000, b"!!bool foo", b"!!int ''", b"!!timestamp foo", b"!!python/object/apply:os.system [true]",
    b"&a [*a]", b"*a", b"<<: {a: 1}", b"? ", b"- " * 3000, b"|\n", b"# ", b"2026-13-45", b"1:2:3.5", b"---\n", b"...\n",
    b"%YAML 9.9\n", b"{[a]: b}\n", b"''",
]  # fmt: skip


def mutate_bytes(content: bytes, rng: Random) -> bytes:
    """One to three splices: a byte changed, a piece dropped, doubled, moved, or replaced by something nasty."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        begin = rng.randrange(len(content) + 1)
        end = min(len(content), begin + rng.choice((0, 1, 1, 2, 5, 20, 500)))
        piece = content[begin:end]
        new = rng.choice((
            bytes([rng.randrange(256)]), b"", piece * 2, piece[::-1], rng.choice(NASTY_BYTES),
            bytes(byte ^ 1 << rng.randrange(8) for byte in piece), content[: rng.randrange(50)],
        ))  # fmt: skip
        content = content[:begin] + new + content[end:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.03 else content


def mutate_document(content: bytes, rng: Random) -> bytes:
    """A JSON document with values, keys or whole parts replaced; or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    document = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(document, rng)
    if rng.random() < 0.05:
        document = [document]
    text = json.dumps(document)
    if rng.random() < 0.05:  # not expressible by dicts: a duplicate key
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode()


def mutate_header(content: bytes, rng: Random) -> bytes:
    """A safetensors file with its header's JSON, the length of it, or any bytes changed."""
    if rng.random() < 0.2:
        return mutate_bytes(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = mutate_document(content[8 : 8 + length], rng)
    announced = len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) - 1, 2**31, 2**63, 2**64 - 1))
    return announced.to_bytes(8, "little") + header + content[8 + length :]


def mutate_lines(content: bytes, rng: Random) -> bytes:
    """YAML or JSON Lines: a line dropped, doubled, moved or indented, its value replaced; or bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(content, rng)
    lines = content.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        index = rng.randrange(len(lines))
        key, colon, _ = lines[index].partition(b":")
        value = rng.choice(NASTY_BYTES) if rng.random() < 0.5 else json.dumps(rng.choice(NASTY)).encode()
        lines[index : index + 1] = rng.choice((
            [], [lines[index]] * 2, [b"  " + lines[index]], [key + colon + b" " + value], [key + colon],
            [value + b": 1", lines[index]], [lines[rng.randrange(len(lines))]],
        ))  # fmt: skip
    return b"\n".join(lines)


def _change(document: Any, rng: Random) -> None:
    node = document
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.85:
            node = node[key]
            continue
        value = deepcopy(rng.choice(NASTY))
        match rng.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[str(rng.choice(NASTY))[:200]] = node.pop(key)
            case 2 if isinstance(node[key], int):
                node[key] += rng.choice((-1, 1, 2, 8, 1000))
            case 3:
                node[key] = _nested(rng.choice((2, 60, 70, 900)))
            case _:
                node[key] = value
        return


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value
