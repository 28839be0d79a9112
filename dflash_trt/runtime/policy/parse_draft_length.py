# SPDX-License-Identifier: Apache-2.0
"""The draft length policy that a setting names."""

from __future__ import annotations

from contextlib import suppress

from dflash_trt.api.plugins import DRAFT_LENGTHS, plugin
from dflash_trt.errors import RequestError
from dflash_trt.runtime.policy.auto_length import AutoLength
from dflash_trt.runtime.policy.draft_length import DraftLength, FixedLength, LengthByBatch
from dflash_trt.runtime.policy.plugin_length import PluginLength


def parse_draft_length(given: int | str, num_draft_tokens: int) -> DraftLength:
    """Policy for auto, 7, 1:7,8:3,32:0 (from batch size 1, 8, 32 on), or a plug-in; RequestError for anything else."""
    text = str(given)
    if (entry := plugin(DRAFT_LENGTHS, text)) is not None:
        return PluginLength(entry, num_draft_tokens)
    with suppress(ValueError):
        if text == "auto":
            return AutoLength(num_draft_tokens)
        pairs = [tuple(map(int, part.split(":"))) for part in (text if ":" in text else f"1:{text}").split(",")]
        schedule = {begin: length for begin, length in pairs if 0 <= length <= num_draft_tokens}
        if len(schedule) == len(pairs) and min(schedule) == 1:
            return LengthByBatch(schedule) if ":" in text else FixedLength(schedule[1])
    raise RequestError(
        f"draft length: expected 0 to {num_draft_tokens}, a schedule by batch size that begins at 1 (1:7,8:3) or auto,"
        f" found {given!r}"
    )
