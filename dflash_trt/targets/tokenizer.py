# SPDX-License-Identifier: Apache-2.0
"""The target's tokenizer: text -> token ids, with or without its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.errors import RequestError
from dflash_trt.targets.quiet import quiet_transformers
from dflash_trt.targets.refusal import refusing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint in `directory`; code that the checkpoint brings along is not run.

    Raises CheckpointError where it has none, or a damaged one.
    """
    from transformers import AutoTokenizer, __version__

    expected = f"tokenizer files that transformers {__version__} loads"
    hint = "download or copy tokenizer.json and tokenizer_config.json again"
    with refusing(directory, expected, hint=hint), quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> list[int]:
    """Token ids of `text`, taken as it is or wrapped in the chat template as the user's message.

    Raises RequestError for text that is not Unicode, and where there is no chat template.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        raise RequestError(f"prompt: expected Unicode text, found {text[error.start]!r} at {error.start}") from None
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    return list(tokenizer(text)["input_ids"])


def check_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RequestError where there is no chat template."""
    if tokenizer.chat_template is None:
        raise RequestError(
            "chat: expected a tokenizer with a chat template, found none", hint="give the prompt as plain text"
        )


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: object) -> list[int]:
    """Token ids of a conversation [{"role": ..., "content": ...}, ...] in the chat template, ready for the answer.

    Raises RequestError for anything that is no conversation, and where there is no template or it refuses this one.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages: expected a list of messages, found {messages!r}")
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f'messages: expected {{"role": text, "content": text}}, found {message!r}')
    check_chat(tokenizer)
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    except (TemplateError, UnicodeEncodeError) as error:
        raise RequestError(f"messages: expected what the chat template takes, found: {error}") from None
    return list(encoded["input_ids"])
