# SPDX-License-Identifier: Apache-2.0
"""What transformers stumbles over becomes an error that names the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError, DFlashError, cut

REDOWNLOAD = "download or copy the checkpoint again"


@contextmanager
def refusing(where: object, expected: str, *, hint: str = REDOWNLOAD) -> Iterator[None]:
    """Raises CheckpointError, `expected` of what is at `where`, for whatever the block stumbles over."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """A fact of config.json, or of the language model's section, that keeps transformers from running a target."""

    path: tuple[str, ...]
    value: str
    expected: str
    runtimes: str
    unless: str = ""
    """A package with which it runs after all."""


NOT_RUN = (
    NotRun(
        path=("model_type",),
        value="kimi_k2",
        expected="a model that transformers has code for; this one's is its checkpoint's own, which is never run",
        runtimes="vLLM or SGLang",
    ),
    NotRun(
        path=("model_type",),
        value="kimi_linear",
        expected="a model whose tokens transformers can take back; it does not restore this one's convolutions",
        runtimes="vLLM or SGLang",
    ),
    NotRun(
        path=("model_type",),
        value="minimax",
        expected="a model whose tokens transformers can take back; this one has a cache of its own, without a crop",
        runtimes="vLLM or SGLang",
    ),
    NotRun(
        path=("quantization_config", "quant_method"),
        value="modelopt",
        expected="weights that transformers reads; it knows no ModelOpt checkpoint",
        runtimes="TensorRT-LLM, vLLM or SGLang",
    ),
    NotRun(
        path=("quantization_config", "quant_method"),
        value="compressed-tensors",
        expected="weights that transformers reads; it needs the package compressed-tensors for these",
        runtimes="vLLM or SGLang",
        unless="compressed_tensors",
    ),
)
"""What transformers 5.23 does not run here, and who serves it."""


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a target that transformers does not run, with the runtime that does."""
    from transformers import CONFIG_MAPPING, __version__

    config = Facts.load(directory / "config.json")
    model_type = config.text("model_type")
    nested = config.section("text_config") if "text_config" in config else config
    for facts in (config, nested):
        # Below images, transformers does have code for kimi_k2: deepseek_v3's.
        _check_not_run(facts, rules=[r for r in NOT_RUN if facts is config or r.path != ("model_type",)])
    if model_type in CONFIG_MAPPING:
        return
    own = " (the checkpoint brings its own code along, which is never run)" if "auto_map" in config else ""
    raise config.error(
        "model_type",
        f"a model that transformers {__version__} has code for{own}",
        hint=_elsewhere("TensorRT-LLM, vLLM or SGLang"),
    )


def _check_not_run(config: Facts, rules: Sequence[NotRun]) -> None:
    for rule in rules:
        facts = config
        for key in rule.path[:-1]:
            if key not in facts:
                break
            facts = facts.section(key)
        else:
            is_found = rule.path[-1] in facts and facts.text(rule.path[-1]) == rule.value
            if is_found and not (rule.unless and find_spec(rule.unless)):
                raise facts.error(rule.path[-1], rule.expected, hint=_elsewhere(rule.runtimes))


def _elsewhere(runtimes: str) -> str:
    return f"serve this target with {runtimes}: dflash-trt serve-config --list"
