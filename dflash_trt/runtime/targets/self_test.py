# SPDX-License-Identifier: Apache-2.0
"""Proves a target before its first request: what decoding does to a sequence, against uncached passes over it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dflash_trt.runtime.targets.target import Segment

if TYPE_CHECKING:
    from dflash_trt.runtime.targets.running_model import HuggingFaceTarget

BLOCK_SIZE = 5
REJECTED = (4, 4, 2, 2, 0, 0)
"""Tokens of each block that are taken back: all drafts, some and none, each twice in a row."""
SECONDS = 1.0
SIZE_NAMES = ("window", "chunk", "conv", "compress", "pool")
"""Parts of the configuration's keys that say where a cache begins to forget, pack or pad."""
LONGEST_ON_RANKS = 64
"""Sharded targets are not timed: all ranks must compute the same passes."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of a row, as a part of the largest value."""
ROUNDING = 0.1
"""In other dtypes: more than this, in half of the rows, is no rounding."""


def disagreement(target: HuggingFaceTarget) -> str | None:
    """Says where rolled back sequences and whole ones differ, in logits or taps; None where they agree.

    Sequences of one token, and around each size of the configuration as far as a second allows; slot 0 is empty before
    and after.
    """
    begin, spent = time.perf_counter(), 0.0
    previous = 0
    for length in probe_lengths(target.model.config):
        expected_cost = spent / max(1, previous) * length if previous else 0.0
        is_ranked = dist.is_available() and dist.is_initialized()
        if length > LONGEST_ON_RANKS if is_ranked else time.perf_counter() - begin + expected_cost > SECONDS:
            break
        started = time.perf_counter()
        if (fault := _fault_at(target, length)) is not None:
            return fault
        spent, previous = time.perf_counter() - started, length
    return None


def fails_blocks_only(target: HuggingFaceTarget) -> bool:
    """Whether logits after several tokens a pass are wrong, though none is taken back, and after one a pass right."""
    faults = [_fault_at(target, 1, size, (0,) * 4, with_taps=False) for size in (1, BLOCK_SIZE)]
    return faults[0] is None and faults[1] is not None


def probe_lengths(config: Any) -> list[int]:
    """Lengths of prompts: one token, and just below and above each size, from where the blocks grow across it."""
    sizes = {size for size in _sizes(config.get_text_config().to_dict()) if size > 1}
    return sorted({1} | {max(1, size + offset) for size in sizes for offset in (-3, 1)})


def _sizes(facts: dict[str, Any]) -> Iterator[int]:
    for key, value in facts.items():
        if isinstance(value, dict):
            named = any(part in key for part in SIZE_NAMES)
            yield from (v for v in value.values() if type(v) is int and named)
            yield from _sizes(value)
        elif type(value) is int and any(part in key for part in SIZE_NAMES) and "layers" not in key:
            yield value


@torch.inference_mode()
def _fault_at(
    target: HuggingFaceTarget,
    length: int,
    block_size: int = BLOCK_SIZE,
    all_rejected: Sequence[int] = REJECTED,
    *,
    with_taps: bool = True,
) -> str | None:
    """What is wrong with a sequence whose prompt has `length` tokens, and with which of its tokens."""
    rng = np.random.default_rng(length)
    tokens = [token for token in range(min(target.vocab_size, 2**16)) if token not in _special(target.model.config)]
    sequence = rng.choice(tokens, length).tolist()
    rows = [_append(target, sequence, 0)]
    for rejected in all_rejected:
        block = rng.choice(tokens, block_size).tolist()
        rows.append(_append(target, block, rejected))
        sequence += block[: block_size - rejected]
    target.release(0)
    logits, taps = (torch.cat(parts) for parts in zip(*rows, strict=True))
    expected_logits, expected_taps = whole_pass(target, sequence)
    wide = len(target.target_layer_ids) * target.tap_hidden_size
    if with_taps and taps.shape[-1] != wide:
        return f"expected taps of {wide} values from its config.json, found {taps.shape[-1]}"
    return _difference("logits", logits, expected_logits, length) or (
        _difference("taps", taps, expected_taps, length) if with_taps else None
    )


def _difference(name: str, found: Tensor, expected: Tensor, length: int) -> str | None:
    """The first row in which `found` [R, W] is not `expected`; None where all are."""
    if found.shape != expected.shape:
        return f"expected {name} of shape {list(expected.shape)}, found {list(found.shape)}"
    errors = (found - expected).abs().amax(-1) / expected.abs().max()
    is_wrong = ~(errors <= TOLERANCES.get(expected.dtype, ROUNDING))
    if expected.dtype not in TOLERANCES and is_wrong.float().mean() < 0.5:  # a router's near tie, which rounding turns
        is_wrong &= ~errors.isfinite()
    if not is_wrong.any():
        return None
    row = int(is_wrong.nonzero()[0])
    return (
        f"{name} of token {row + 1} differ by {float(errors[row]):.2g} of the largest from an uncached pass, after a"
        f" prompt of {length}"
    )


def _append(target: HuggingFaceTarget, token_ids: Sequence[int], rejected: int) -> tuple[Tensor, Tensor]:
    """Logits and taps of the tokens that stay."""
    kept = len(token_ids) - rejected
    segment = Segment(slot=0, token_ids=list(token_ids), num_logits=len(token_ids))
    verified = target.verify([segment], with_taps=True)
    rows = verified.logits[:kept].clone(), verified.taps[:kept].clone()
    target.rollback(0, rejected)
    return rows


def _special(config: Any) -> set[int]:
    """Padding, which some embeddings hold as a row of zeros, and what begins or ends a text."""
    text = config.get_text_config()
    return {token for key in ("pad", "bos", "eos") if type(token := getattr(text, f"{key}_token_id", None)) is int}


def whole_pass(target: HuggingFaceTarget, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [R, V] and taps [R, A*W] of an uncached pass, the taps as the layers themselves return them."""
    model = target.model
    caught: dict[int, Tensor] = {}
    handles = []
    layers: Any = getattr(model.get_decoder(), "layers", None)
    for index in {*target.target_layer_ids} if layers is not None else ():

        def catch(_: Any, __: Any, output: Any, index: int = index) -> None:
            caught[index] = output[0] if isinstance(output, tuple) else output

        handles.append(layers[index].register_forward_hook(catch))
    try:
        output = model(
            torch.tensor([list(token_ids)], device=model.device), use_cache=False, output_hidden_states=not caught
        )
    finally:
        for handle in handles:
            handle.remove()
    num_layers = model.config.get_text_config().num_hidden_layers
    if not caught and len(output.hidden_states) != num_layers + 1:  # layers that are computed again and again
        raise ValueError(f"taps: expected the outputs of {num_layers} layers, found {len(output.hidden_states) - 1}")
    taps = [caught[i] if caught else output.hidden_states[i + 1] for i in target.target_layer_ids]
    wide = [_streams(tap[0], target.tap_hidden_size) for tap in taps]
    device = output.logits.device
    return output.logits[0], torch.cat([tap.to(device) for tap in wide], dim=-1)


def _streams(rows: Tensor, width: int) -> Tensor:
    """rows [R, W], or [R, streams, H] -> [R, width]: the streams side by side, or their mean."""
    if rows.dim() == 2:
        return rows
    streams = rows.unbind(1)
    return torch.cat(streams, dim=-1) if width != rows.shape[-1] else torch.stack(streams).sum(0) / len(streams)
