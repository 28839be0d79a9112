# SPDX-License-Identifier: Apache-2.0
"""Groups as a server would have brought them, from counts."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup
from dflash_trt.observe.endpoints.observed_acceptance import drafting

SHARES = (0.7, 0.5, 0.3, 0.2, 0.1, 0.08, 0.05)
STEPS = 20


def sample(prompt: str, shares: tuple[float, ...], *, text: str = "same", **fields: int) -> ProbeAnswer:
    """STEPS passes that accepted the drafts at each position in these shares of them."""
    counts = tuple(round(share * STEPS) for share in shares)
    accepted = sum(counts)
    return ProbeAnswer(
        prompt=prompt, text=text, output_tokens=STEPS + accepted, input_tokens=fields.get("input_tokens", 30),
        cached_tokens=fields.get("cached_tokens"), seconds=1.0,
        acceptance=drafting(STEPS, accepted, STEPS * fields.get("draft_length", len(shares)), counts),
        tau_of_drafting_passes=1 + accepted / STEPS,
    )  # fmt: skip


def group(name: str, factor: float = 1.0, *, count: int = 16, text: str = "same", **fields: int) -> ProbeGroup:
    """Requests whose acceptance is `factor` times a healthy one's, a little more or less."""
    samples = []
    for index in range(count):
        wobble = factor * (1 + 0.2 * (index % 5 - 2) / 2)
        shares = tuple(min(1.0, share * wobble) for share in SHARES)
        samples.append(sample(f"p{index}", shares, text=f"{text}-{index}", **fields))
    return ProbeGroup(name=name, samples=samples)
