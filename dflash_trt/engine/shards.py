# SPDX-License-Identifier: Apache-2.0
"""Shards: parts of a drafter that ranks share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, TypeVar

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.draft_tensors import added_shapes
from dflash_trt.checkpoint.number_formats import BLOCK, FORMATS

Spec = TypeVar("Spec", bound=PartialDraftSpec)


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a drafter that an engine directory holds: the heads and MLP channels of one rank of several."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    num_ranks: Annotated[int, msgspec.Meta(ge=2)] = msgspec.field(name="ranks")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks}"

    @property
    def directory(self) -> str:
        """Folder in the engine directory of the whole drafter."""
        return f"rank{self.rank}"


def shards(num_ranks: int) -> list[Shard]:
    """Shards of all ranks; none where one rank has the whole drafter."""
    return [Shard(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)] if num_ranks > 1 else []


def not_shared(spec: PartialDraftSpec, num_ranks: int, algorithms: Collection[str] = ()) -> str | None:
    """Why `num_ranks` ranks cannot share a draft: "expected ..., found ..."; None where they can, as one rank can.

    `algorithms` are those of its layers, where they are known.
    """
    if num_ranks == 1:
        return None
    block = max((FORMATS[algorithm].block or BLOCK for algorithm in algorithms), default=BLOCK)
    for what, count, step in (
        ("KV heads", spec.num_key_value_heads, 1),
        ("query heads", spec.num_attention_heads, 1),
        (f"MLP channels in blocks of {block}", spec.intermediate_size, block),
    ):
        if count % (num_ranks * step):
            return f"expected {what} that {num_ranks} ranks share evenly, found {count}"
    additions = [*spec.own_vocabulary, *added_shapes(spec)]
    additions += ["sample_from_anchor"] * spec.sample_from_anchor
    return f"expected a plain DFlash draft for {num_ranks} ranks, found {additions[0]}" if additions else None


def shard_spec(spec: Spec, num_ranks: int) -> Spec:
    """`spec` with a rank's share: whole KV heads with their queries, MLP channels in whole blocks of quantisation."""
    return msgspec.structs.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // num_ranks,
        num_key_value_heads=spec.num_key_value_heads // num_ranks,
        intermediate_size=spec.intermediate_size // num_ranks,
    )
