# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer of a checkpoint; errors of transformers become a CheckpointError that names the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.errors import CheckpointError, DFlashError, cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REDOWNLOAD = "download or copy the checkpoint again"
OF_A_GPU = ("AcceleratorError", "OutOfMemoryError")
"""Errors of torch that a checkpoint does not cause."""


@contextmanager
def refusing(where: object, expected: str, *, hint: str = REDOWNLOAD) -> Iterator[None]:
    """Raises any error of transformers in the block as CheckpointError "`where`: expected `expected`, found ...".

    Errors of a GPU pass through. transformers' progress bars and warnings are silenced.
    """
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:
        if isinstance(error, DFlashError) or type(error).__name__ in OF_A_GPU:
            raise
        raise CheckpointError(f"{where}: expected {expected}, found {_reason(error)}", hint=hint) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """The error on one line, without transformers' advice to trust remote code."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()))
    return cut(f"{type(error).__name__}: {' '.join(s for s in sentences if 'trust_remote_code' not in s)}")


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
