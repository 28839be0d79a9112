# SPDX-License-Identifier: Apache-2.0
"""Bytes and estimated time of gpt-oss-120b's drafter by recipe and head; writes the tables of benchmarks/RESULTS.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.number_formats import FP8, NVFP4, W4A16_NVFP4
from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.sizes import WEIGHT_BITS
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.drafter_pass import PLAN, drafter_pass
from dflash_trt.observe.estimate.drafter_terms import Head
from dflash_trt.observe.estimate.inputs import target_shape
from dflash_trt.observe.estimate.step_cost import StepCost, StepLoad
from dflash_trt.quantize.recipe import load_recipe, recipe_names

DRAFT, TARGET = "z-lab/gpt-oss-120b-DFlash", "openai/gpt-oss-120b"
RUNTIME = "trtllm"
CONTEXT_TOKENS = 1024
"""Context of each request."""
BATCHES = (1, 64)
TRIMMED = 32768
SYSTEMS = (("one B300", "b300", 1), ("8 x B300", "b300", 8), ("one H200", "h200", 1))
"""Name, GPU, and number of ranks that share the target's lm_head."""
PAGE = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: a recipe with a head on a GPU."""

    recipe: str
    head: Head
    gpu: str = "b300"
    batch: int = 1


def heads(ranks: int = 1) -> dict[str, Head]:
    """By what `--head` calls them."""
    rows = target_shape(TARGET).vocab_size
    return {
        "target": Head(rows=rows, ranks=ranks),
        "fp8": Head(rows=rows, bits=WEIGHT_BITS[FP8]),
        "nvfp4": Head(rows=rows, bits=WEIGHT_BITS[NVFP4]),
        f"trim:{TRIMMED}": Head(rows=TRIMMED),
        f"trim:{TRIMMED}:fp8": Head(rows=TRIMMED, bits=WEIGHT_BITS[FP8]),
        f"trim:{TRIMMED}:nvfp4": Head(rows=TRIMMED, bits=WEIGHT_BITS[NVFP4]),
    }


@cache
def _algorithms(recipe: str) -> dict[str, str]:
    """By module of the draft."""
    return dict(load_recipe(recipe).algorithms(published_drafts()[DRAFT].spec.linear_modules()))


def cost(setting: Setting) -> StepCost:
    """A pass of the drafter."""
    spec = published_drafts()[DRAFT].spec
    algorithms = _algorithms(setting.recipe)
    load = StepLoad(batch=setting.batch, num_draft_tokens=spec.block_size - 1, context=CONTEXT_TOKENS)
    backend = RUNTIME if W4A16_NVFP4 in algorithms.values() else PLAN  # no plan has it
    return drafter_pass(spec, algorithms, rates(known_gpu(setting.gpu), RUNTIME), load, setting.head, backend=backend)


def weight_bytes(recipe: str) -> float:
    """Bytes of the drafter's linear layers, scales included."""
    layers = ("tap projection", "context K and V", "layers")
    spec = published_drafts()[DRAFT].spec
    read = sum(term.bytes for term in cost(Setting(recipe=recipe, head=Head(rows=0))).terms if term.name in layers)
    return read - _context_bytes(spec, recipe)


def _context_bytes(spec: PartialDraftSpec, recipe: str) -> float:
    """K and V's weights, which a pass reads twice: for the context and for the block."""
    terms = cost(Setting(recipe=recipe, head=Head(rows=0))).terms
    return next(term.bytes for term in terms if term.name == "context K and V")


def tables() -> dict[str, str]:
    """The tables in Markdown, by the name of their marks."""
    by_system = {
        name: _table(f"{name}, us", heads(ranks), partial(_microseconds, gpu=gpu)) for name, gpu, ranks in SYSTEMS
    }
    return {"bytes": _table("GB", heads(), _gigabytes), **by_system}


def _table(corner: str, columns: dict[str, Head], cell: Callable[[str, Head], str]) -> str:
    lines = [f"| {corner} | {' | '.join(f'`{head}`' for head in columns)} |", f"|---|{'---|' * len(columns)}"]
    for recipe in _recipes():
        lines.append(f"| `{recipe}` | {' | '.join(cell(recipe, head) for head in columns.values())} |")
    return "\n".join(lines)


def _recipes() -> list[str]:
    """The largest first."""
    return sorted(recipe_names(), key=lambda name: (-weight_bytes(name), name))


def _gigabytes(recipe: str, head: Head) -> str:
    return f"{(weight_bytes(recipe) + head.num_bytes(published_drafts()[DRAFT].spec.hidden_size)) / 1e9:.2f}"


def _microseconds(recipe: str, head: Head, gpu: str) -> str:
    passes = (cost(Setting(recipe=recipe, head=head, gpu=gpu, batch=batch)) for batch in BATCHES)
    return " / ".join(f"{one.seconds * 1e6:.0f}" for one in passes)


def replace_tables(page: str) -> str:
    """`page` with the present tables between those marks that it has."""
    for name, text in tables().items():
        begin, end = (mark.format(name=name) for mark in MARKS)
        page = re.sub(f"{begin}.*{end}", f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)
    return page


def main() -> None:
    """Rewrites the tables."""
    PAGE.write_text(replace_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
