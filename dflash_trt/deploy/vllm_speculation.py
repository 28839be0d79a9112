# SPDX-License-Identifier: Apache-2.0
"""How vLLM 0.33.0 reads the arguments of speculation: its short flags, and a method that is left out.

vllm/engine/arg_utils.py, create_speculative_config; vllm/config/speculative.py, __post_init__ of SpeculativeConfig.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_trt.deploy.finding import ERROR, Finding

SECTION = "speculative_config"
SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Keys of the section by the flags that stand for them."""
INFERRED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("eagle", "eagle-", ()),
    ("eagle3", "eagle3", ()),
    ("dflash", "dflash", ("MuseGlimmerAssistantModel",)),
    ("dspark", "dspark", ("Qwen3DSparkModel", "Gemma4DSparkModel", "DSparkDraftModel")),
)
"""Methods in vLLM's order, by a part of the draft's path or an architecture of its config.json."""
DEFAULT = "draft_model"
"""An ordinary model that drafts token by token."""


def with_short_flags(document: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """The arguments with all of speculation in its section, and a finding for each key that is given twice."""
    section = document.get(SECTION)
    short = {key: document[flag] for flag, key in SHORT.items() if document.get(flag) is not None}
    if not isinstance(section, dict) and (section is not None or not short):
        return document, []
    named = {str(key).replace("-", "_"): value for key, value in (section or {}).items()}
    twice = sorted(short.keys() & named.keys())
    findings = [
        Finding(
            "twice", ERROR, f"{SECTION}.{key}", "given in the section and by a flag, which vLLM refuses", "remove one"
        )
        for key in twice
    ]
    return document | {SECTION: short | named}, findings


def inferred_method(section: dict[str, Any], architectures: Iterable[str] = ()) -> str:
    """The method that vLLM takes where the section has none."""
    model = section.get("model")
    if model in ("ngram", "[ngram]"):
        return "ngram"
    path, found = str(model or "").lower(), set(architectures)
    return next((method for method, part, names in INFERRED if part in path or found & {*names}), DEFAULT)
