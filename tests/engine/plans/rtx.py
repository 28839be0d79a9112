# SPDX-License-Identifier: Apache-2.0
"""Runs NVIDIA's real parser and builder, of TensorRT-RTX, on a graph, on any machine."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.compile import build_plan
from dflash_trt.engine.plans.plan import PlanOptions, profiles
from dflash_trt.engine.plans.tensorrt_api import installed_library, load_plugin, load_tensorrt, make_logger
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.engine.plans.plan_layers import Layer, logged_layers, summary
from tests.engines import build, build_with_head
from tests.paths import FIXTURES, REPOSITORY

PAIRS = {"tiny-gpt-oss-dflash": "tiny-gpt-oss", "tiny-qwen3-dflash": "tiny-qwen3"}
DFLASH2 = "tiny-qwen3-dflash2"
OWN_HEAD = "own head"
HEADS: dict[str, range | None] = {"tiny-qwen3-dflash": None, DFLASH2: range(400), "tiny-qwen3-lilicorr": None}
"""Drafts with a head of their own in BF16, and its tokens: None for all."""
SHARED = "tiny-gpt-oss-dflash of 2 ranks"
QUICK = ("bf16", "fp8", "nvfp4")
RECIPES = ("bf16", "fp8", "int4-w4a16", "nvfp4", "nvfp4-native", "mixed-nvfp4-fp8")
GOLDEN = REPOSITORY / "tests" / "golden" / "plan_layers.json"
Engines = Callable[[str, str], Path]
SIZES = PlanOptions(max_batch_size=1, max_seq_len=2048, max_num_tokens=16, runtime="tensorrt_rtx")


@cache
def tensorrt_rtx() -> Any:
    """The module, with our plugin; skips where the extra is not installed."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install -e '.[rtx]' has it on Linux")
    trt = load_tensorrt("tensorrt_rtx")
    load_plugin(trt, installed_library(), "DFlashKVInjectionAttention", "5", "dflash_trt")
    return trt


@contextmanager
def messages() -> Iterator[list[str]]:
    """Messages of the builder, including VERBOSE ones."""
    said = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_logger(tensorrt_rtx()), "log", lambda severity, message: said.append(message))
        yield said


def compiled(
    engine: Path, graph: str, *sms: str, options: PlanOptions = SIZES, profile: int = 0
) -> tuple[bytes, list[Layer]]:
    """The plan of one graph for these compute capabilities, and its layers. BuildError where the builder refuses."""
    plan = io.BytesIO()
    with messages() as said:
        build_plan(
            tensorrt_rtx(), engine, read_manifest(engine).graphs[graph], [profiles(graph, options)[profile]], options,
            compute_capabilities=sms or ("12.0",), plugin=None, timing_cache=None, output=plan,
        )  # fmt: skip
    return plan.getvalue(), logged_layers(said)


def engine_of(draft: str, recipe: str, directory: Path) -> Path:
    """The engine of a fixture in a recipe, or a rank's; OWN_HEAD is one of HEADS."""
    if recipe == OWN_HEAD:
        return build_with_head(FIXTURES / draft, FIXTURES / "tiny-qwen3", directory, HEADS[draft])
    name, _, shared = draft.partition(" of ")
    num_ranks = int(shared.split()[0]) if shared else 1
    quantize_checkpoint(read_draft(FIXTURES / name), load_recipe(recipe), directory / "checkpoint")
    build(directory / "checkpoint", directory / "engine", FIXTURES / PAIRS[name], num_ranks)
    return directory / "engine" / ("rank1" if shared else "")


def main() -> None:
    """Prints tests/golden/plan_layers.json: `python -m tests.engine.plans.rtx >tests/golden/plan_layers.json`."""
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        counted = [(draft, recipe) for draft in PAIRS for recipe in RECIPES] + [(SHARED, recipe) for recipe in QUICK]
        for draft, recipe in (*counted, *((draft, OWN_HEAD) for draft in HEADS)):
            engine = engine_of(draft, recipe, Path(directory, draft, recipe))
            layers = {graph: summary(compiled(engine, graph)[1]) for graph in read_manifest(engine).graphs}
            table.setdefault(draft, {})[recipe] = layers
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
