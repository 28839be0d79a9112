# SPDX-License-Identifier: Apache-2.0
"""The table of docs/quantization.md: which runtime reads a draft of each recipe.

After a wanted change: python -m tools.quantization_page
"""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.checkpoint.number_formats import W4A16_NVFP4
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.rules.quantized_rules import lowest_gpu, unread, weights_only_below
from dflash_trt.deploy.schema import Runtime
from dflash_trt.quantize.loadable import LOADABLE
from dflash_trt.quantize.recipe import load_recipe, recipe_names

DRAFT = "z-lab/gpt-oss-120b-DFlash"
"""A draft with every kind of linear layer."""
PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"
BEGIN, END = "<!-- readers: begin -->", "<!-- readers: end -->"
COLUMNS = ("recipe", "our engines", "vLLM 0.33", "SGLang 0.5.23", "TensorRT-LLM's own DFlash")


def table() -> str:
    """The table in Markdown."""
    rows = [(f"`{name}`", *_cells(_algorithms(name))) for name in recipe_names()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows))


def replaced(page: str) -> str:
    """`page` with the present table between its marks."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", page, flags=re.DOTALL)


def _algorithms(recipe: str) -> dict[str, str]:
    return dict(load_recipe(recipe).algorithms(published_drafts()[DRAFT].spec.linear_modules()))


def _cells(algorithms: dict[str, str]) -> tuple[str, ...]:
    native = LOADABLE["trtllm-native"]
    is_native = all(native.allows(*each) for each in algorithms.items()) and len(set(algorithms.values())) < 2
    engine = "CPU; no plans" if W4A16_NVFP4 in algorithms.values() else "yes"
    return (
        engine,
        _reader("vllm", algorithms),
        _reader("sglang", algorithms),
        "no" if not is_native else "written for it" if algorithms else "yes",
    )


def _reader(runtime: Runtime, algorithms: dict[str, str]) -> str:
    formats = sorted(set(algorithms.values()))
    if not formats:
        return "yes"
    if unread(runtime, formats) is not None:
        return "no"
    lowest, computing = lowest_gpu(runtime, formats), weights_only_below(formats)
    assert lowest is not None
    seen = LOADABLE["vllm-0.33"]
    is_seen = runtime == "vllm" and all(seen.allows(*each) for each in algorithms.items())
    cell = f"{'loaded on a CPU' if is_seen else 'source'}; SM {lowest[0]}.{lowest[1]}"
    return cell if computing is None or computing <= lowest else f"{cell}, computes from {computing[0]}.{computing[1]}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
