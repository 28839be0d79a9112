# SPDX-License-Identifier: Apache-2.0
"""Errors of transformers become a CheckpointError that names the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_trt.errors import CheckpointError, DFlashError, cut

REDOWNLOAD = "download or copy the checkpoint again"
OF_A_GPU = ("AcceleratorError", "OutOfMemoryError")
"""Errors of torch that no checkpoint is to blame for."""


@contextmanager
def refusing(where: object, expected: str, *, hint: str = REDOWNLOAD) -> Iterator[None]:
    """Raises CheckpointError "`where`: expected `expected`, found ..." for any error of transformers in the block.

    Lets those of a GPU pass. Silences its progress bars and warnings.
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
    """The error on one line, without the advice to run code that the checkpoint brings along."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()))
    return cut(f"{type(error).__name__}: {' '.join(s for s in sentences if 'trust_remote_code' not in s)}")
