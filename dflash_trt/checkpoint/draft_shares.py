# SPDX-License-Identifier: Apache-2.0
"""A rank's share of a draft: whole KV heads with their queries, and MLP channels in whole blocks of quantisation."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.quantization import BLOCK

Spec = TypeVar("Spec", bound=PartialDraftSpec)


def not_shared(spec: PartialDraftSpec, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks cannot share a draft: "expected ..., found ..."; None where they can, as one rank can."""
    if num_ranks == 1:
        return None
    for what, count, step in (
        ("KV heads", spec.num_key_value_heads, 1),
        ("query heads", spec.num_attention_heads, 1),
        (f"MLP channels in blocks of {BLOCK}", spec.intermediate_size, BLOCK),
    ):
        if count % (num_ranks * step):
            return f"expected {what} that {num_ranks} ranks share evenly, found {count}"
    additions = [*spec.own_vocabulary, *spec.dflash2_shapes(), *spec.dspark_shapes()]
    additions += ["sample_from_anchor"] * spec.sample_from_anchor
    return f"expected a plain DFlash draft for {num_ranks} ranks, found {additions[0]}" if additions else None


def shard_spec(spec: Spec, num_ranks: int) -> Spec:
    """`spec` with a rank's heads and MLP channels."""
    return msgspec.structs.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // num_ranks,
        num_key_value_heads=spec.num_key_value_heads // num_ranks,
        intermediate_size=spec.intermediate_size // num_ranks,
    )
