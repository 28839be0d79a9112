# SPDX-License-Identifier: Apache-2.0
"""The target's tokenizer: text -> token ids, with or without its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint in `directory`; code that the checkpoint brings along is not run."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> list[int]:
    """Token ids of `text`, taken as it is or wrapped in the chat template as the user's message."""
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if tokenizer.chat_template is None:
        raise RequestError("--chat: expected a tokenizer with a chat template, found none", hint="leave --chat out")
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
