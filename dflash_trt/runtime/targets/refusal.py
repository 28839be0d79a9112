# SPDX-License-Identifier: Apache-2.0
"""Turns exceptions of transformers into errors that name the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError, DFlashError, cut

REDOWNLOAD = "download or copy the checkpoint again"


@contextmanager
def refusing(where: object, expected: str, *, hint: str = REDOWNLOAD) -> Iterator[None]:
    """Raises CheckpointError, `expected` of what is at `where`, for whatever transformers stumbles over in the block.

    Silences its progress bars and warnings.
    """
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: expected {expected}, found {_reason(error)}", hint=hint) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """Message of transformers on one line, without its advice to run the checkpoint's own code."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()))
    return cut(f"{type(error).__name__}: {' '.join(s for s in sentences if 'trust_remote_code' not in s)}")


NOT_RUN = {
    "kimi_k2": "a model that transformers has code for; this one's is its checkpoint's own, which is never run",
    "kimi_linear": "a model whose tokens transformers can take back; it does not restore this one's convolutions",
    "minimax": "a model whose tokens transformers can take back; this one has a cache of its own, without a crop",
    "modelopt": "weights that transformers reads; it knows no ModelOpt checkpoint",
    "compressed-tensors": "weights that transformers reads; it needs the package compressed-tensors for these",
}
"""A model_type or quant_method that transformers 5.23 does not run here, and what was expected in its place."""


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a target that transformers does not run, with the runtime that does."""
    from transformers import CONFIG_MAPPING, __version__

    config = Facts.load(directory / "config.json")
    model_type = config.text("model_type")
    nested = [config.section("text_config")] if "text_config" in config else []
    quantised = [facts.section("quantization_config") for facts in (config, *nested) if "quantization_config" in facts]
    # Below images, transformers does have code for kimi_k2: deepseek_v3's.
    for facts in (config, *quantised):
        for key in ("model_type", "quant_method"):
            value = facts.optional(key, facts.text)
            is_loaded = value == "compressed-tensors" and find_spec("compressed_tensors") is not None
            if value in NOT_RUN and not is_loaded:
                runtimes = "TensorRT-LLM, vLLM or SGLang" if value == "modelopt" else "vLLM or SGLang"
                raise facts.error(key, NOT_RUN[value], hint=_elsewhere(runtimes))
    if model_type in CONFIG_MAPPING:
        return
    own = " (the checkpoint brings its own code along, which is never run)" if "auto_map" in config else ""
    raise config.error(
        "model_type",
        f"a model that transformers {__version__} has code for{own}",
        hint=_elsewhere("TensorRT-LLM, vLLM or SGLang"),
    )


def _elsewhere(runtimes: str) -> str:
    return f"serve this target with {runtimes}: dflash-trt serve-config --list"
