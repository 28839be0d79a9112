# SPDX-License-Identifier: Apache-2.0
"""Series as each runtime's servers publish them, a sample a minute, in promtool's notation."""

from __future__ import annotations

from collections.abc import Sequence

Series = dict[str, str]
"""Name with labels -> values."""
MINUTES = 120
PASSES = 600
"""Verify passes a minute of a healthy server."""


def grows(per_minute: float, minutes: int = MINUTES) -> str:
    return f"0+{per_minute:g}x{minutes}"


def server(
    kind: str, accepted: Sequence[float], *, drafted: float | None = None, instance: str = "a", engine: str = "0",
    has_drafter: bool = True, waiting: str | None = None,
) -> Series:  # fmt: skip
    """One engine that accepts drafts at each position in these shares of its passes.

    `drafted` is the mean length of drafts where it is shorter than what has series.
    """
    length = len(accepted) if drafted is None else drafted
    per_pass = 1 + sum(accepted)
    common = f'model_name="m",instance="{instance}"'
    if kind in ("vllm", "dflash_trt"):
        return _vllm(f'{common},engine="{engine}"', accepted, length, has_drafter=has_drafter, waiting=waiting)
    if kind == "sglang":
        found = {
            "sglang:generation_tokens_total": grows(PASSES * per_pass + 10),
            "sglang:num_requests_total": grows(10),
        }
        if has_drafter:
            found["sglang:spec_verify_calls_total"] = grows(PASSES)
        found["sglang:num_queue_reqs"] = waiting or f"0x{MINUTES}"
        return {f"{name}{{{common}}}": values for name, values in found.items()}
    found = {
        f"trtllm_generation_tokens_total{{{common}}}": grows(PASSES * per_pass),
        f"trtllm_num_requests_waiting{{{common}}}": waiting or f"0x{MINUTES}",
    }
    for position, share in enumerate(accepted if has_drafter else ()):
        label = f'{{{common},token_position="{position}"}}'
        found[f"trtllm_spec_decode_drafted_tokens_total{label}"] = grows(PASSES if position < length else 0)
        found[f"trtllm_spec_decode_accepted_tokens_total{label}"] = grows(PASSES * share)
    return found


def _vllm(
    labels: str, accepted: Sequence[float], length: float, *, has_drafter: bool, waiting: str | None
) -> Series:  # fmt: skip
    found = {
        f"vllm:generation_tokens_total{{{labels}}}": grows(PASSES * (1 + sum(accepted))),
        f"vllm:num_requests_waiting{{{labels}}}": waiting or f"0x{MINUTES}",
    }
    if not has_drafter:
        return found
    name = "vllm:spec_decode_num"
    found[f"{name}_drafts_total{{{labels}}}"] = grows(PASSES)
    found[f"{name}_draft_tokens_total{{{labels}}}"] = grows(PASSES * length)
    found[f"{name}_accepted_tokens_total{{{labels}}}"] = grows(PASSES * sum(accepted))
    for position, share in enumerate(accepted):
        found[f'{name}_accepted_tokens_per_pos_total{{{labels},position="{position}"}}'] = grows(PASSES * share)
    return found
