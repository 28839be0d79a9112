# SPDX-License-Identifier: Apache-2.0
"""What transformers stumbles over becomes an error that names the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError, DFlashError, cut

REDOWNLOAD = "download or copy the checkpoint again"


@contextmanager
def refusing(where: object, expected: str, *, hint: str = REDOWNLOAD) -> Iterator[None]:
    """Raises CheckpointError, `expected` of what is at `where`, for whatever the block raises.

    transformers raises what its code happens to stumble over: KeyError, TypeError, OSError, a tokenizer's Exception.
    """
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: expected {expected}, found {_reason(error)}", hint=hint) from error


def _reason(error: Exception) -> str:
    """What transformers says, on one line, without its advice to run code that the checkpoint brings along."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()))
    return cut(f"{type(error).__name__}: {' '.join(s for s in sentences if 'trust_remote_code' not in s)}")


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a model that transformers has no code for: the checkpoint's own is never run."""
    from transformers import CONFIG_MAPPING, __version__

    config = Facts.load(directory / "config.json")
    if config.text("model_type") in CONFIG_MAPPING:
        return
    own = " (the checkpoint brings its own code along, which is never run)" if "auto_map" in config else ""
    raise config.error(
        "model_type",
        f"a model that transformers {__version__} has code for{own}",
        hint="serve this target with TensorRT-LLM, vLLM or SGLang: dflash-trt serve-config --list",
    )
