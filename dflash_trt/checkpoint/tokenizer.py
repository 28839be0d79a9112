# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a target checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.checkpoint.refusing import refusing
from dflash_trt.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint in `directory`; CheckpointError for a missing or damaged one."""
    from transformers import AutoTokenizer, __version__

    expected = f"tokenizer files that transformers {__version__} loads"
    hint = "download or copy tokenizer.json and tokenizer_config.json again"
    with refusing(directory, expected, hint=hint):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers' tokenizer for a directory without one
        raise CheckpointError(f"{directory}: expected {expected}, found none", hint=hint)
    return tokenizer
