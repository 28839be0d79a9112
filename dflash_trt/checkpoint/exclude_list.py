# SPDX-License-Identifier: Apache-2.0
"""Checks the lists of dense modules in a quantised draft's configuration against its tensors.

Runtimes build a layer dense or packed by these lists, whatever its tensors are. Model Optimizer 0.47's DFlash exporter
writes names of its training wrapper, among them "model*", which covers every layer of the draft in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import HEAD
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG, SECTION, claims_of
from dflash_trt.errors import cut


def exclude_list_problem(draft: DraftCheckpoint) -> str | None:
    """The first list of dense modules that does not fit the draft's tensors, in words; None where all fit.

    Raises CheckpointError for a list that is none.
    """
    if not (packed := draft.quantization.modules):
        return None
    dense = [module for module in draft.spec.linear_modules() if module not in packed]
    for place, claims in _claims(draft):
        if "quantized_layers" in claims:
            listed = claims.section("quantized_layers").keys()
            if missing := sorted(packed.keys() - listed):
                return f"{place}.quantized_layers misses {_some(missing)}, which the tensors show as quantised"
            continue
        key = "ignore" if "ignore" in claims else "exclude_modules"
        patterns = claims.texts(key) if key in claims else ()
        for pattern in patterns:
            if covered := [module for module in packed if _excludes(pattern, module)]:
                return f"{place}.{key} lists {cut(pattern)!r} as dense, which covers {_some(covered)}"
        if missing := [module for module in dense if not any(_excludes(each, module) for each in patterns)]:
            return f"{place}.{key} misses {_some(missing)}, which the tensors show as dense"
    return None


def _claims(draft: DraftCheckpoint) -> Iterator[tuple[str, Facts]]:
    """The configurations of the quantisation, each with its place."""
    file = draft.config.file.with_name(HF_QUANT_CONFIG)
    if draft.config.peek(SECTION):
        yield f"{draft.config.file.name}: {SECTION}", claims_of(draft.config.section(SECTION))
    if file.is_file():
        yield f"{file.name}: quantization", claims_of(Facts.load(file))


def _excludes(pattern: str, module: str) -> bool:
    """Whether vLLM 0.33 takes a module for dense by a pattern: equal, contained, or matched (ModelOptQuantConfigBase).

    The draft's layers lie at `model.` in vLLM; lm_head is compared whole.
    """
    names = (module, module if module == HEAD else f"model.{module}")
    return any(name == pattern or (pattern != HEAD and pattern in name) or fnmatchcase(name, pattern) for name in names)


def _some(modules: Iterable[str]) -> str:
    names = list(modules)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
