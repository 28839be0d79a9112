# SPDX-License-Identifier: Apache-2.0
"""A rank's share of a draft: whole KV heads with their queries, and MLP channels in whole blocks of quantisation."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.quantization import BLOCK, BLOCKS

Spec = TypeVar("Spec", bound=PartialDraftSpec)


def not_shared(spec: PartialDraftSpec, num_ranks: int, algorithms: Collection[str] = ()) -> str | None:
    """Why `num_ranks` ranks cannot share a draft: "expected ..., found ..."; None where they can, as one rank can.

    `algorithms` are those of its layers, where they are known.
    """
    if num_ranks == 1:
        return None
    block = max((BLOCKS.get(algorithm, BLOCK) for algorithm in algorithms), default=BLOCK)
    for what, count, step in (
        ("KV heads", spec.num_key_value_heads, 1),
        ("query heads", spec.num_attention_heads, 1),
        (f"MLP channels in blocks of {block}", spec.intermediate_size, block),
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
