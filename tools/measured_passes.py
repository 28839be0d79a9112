# SPDX-License-Identifier: Apache-2.0
"""A drafter's pass as it was measured on a GPU (measured_passes.json), beside what the cost model says of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.drafter_pass import PLAN, drafter_pass
from dflash_trt.observe.estimate.shapes import backends
from dflash_trt.observe.estimate.step_cost import StepLoad

OUTSIDE = ("tap projection", "context K and V")
"""Terms of a step that the measured pass has not: context.onnx does them."""
COMPARED = (PLAN, "torch", "trtllm", "vllm", "sglang")


class MeasuredPass(msgspec.Struct, frozen=True, array_like=True):
    algorithm: str
    """Number format of every linear layer but fc; "" is BF16."""
    context: int
    requests: int
    microseconds: float


class MeasuredPasses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    draft: str
    gpu: str
    backend: str
    source: str
    microseconds: tuple[MeasuredPass, ...]


@cache
def measured_passes() -> MeasuredPasses:
    """The data file, read once."""
    return read_json(Path(__file__).with_suffix(".json"), MeasuredPasses, ConfigError, what="measured passes")


def predict(measured: MeasuredPass, backend: str) -> float:
    """Microseconds of the same pass by the model, if `backend` ran it."""
    passes = measured_passes()
    spec = published_drafts()[passes.draft].spec
    algorithms = {name: measured.algorithm for name in spec.linear_modules() if measured.algorithm and name != "fc"}
    load = StepLoad(batch=measured.requests, num_draft_tokens=spec.num_draft_tokens, context=measured.context)
    cost = drafter_pass(spec, algorithms, rates(known_gpu(passes.gpu), "trtllm"), load, backend=backend)
    return 1e6 * sum(term.seconds for term in cost.terms if term.name not in OUTSIDE)


def table() -> str:
    """Measured and predicted passes in Markdown; other backends predicted alone."""
    passes = measured_passes()
    titles = [backends()[name].title for name in COMPARED]
    lines = [
        f"| weights | context | requests | measured, us | predicted | error | {' | '.join(titles)} |",
        "|---" * (6 + len(titles)) + "|",
    ]
    for measured in passes.microseconds:
        value = predict(measured, passes.backend)
        others = (f"{predict(measured, name):,.0f}" for name in COMPARED)
        lines.append(
            f"| {measured.algorithm or 'BF16'} | {measured.context:,} | {measured.requests} |"
            f" {measured.microseconds:,.0f} | {value:,.0f} | {value / measured.microseconds - 1:+.0%} |"
            f" {' | '.join(others)} |"
        )
    return "\n".join(lines)


def counts() -> str:
    """The statements per backend, with their sources, in Markdown."""
    spec = published_drafts()[measured_passes().draft].spec
    lines = ["| backend | kernels a layer, BF16 | where they were counted | checked |", "|---|---|---|---|"]
    for backend in backends().values():
        layer = sum(each.count for each in backend.layer if each.when in ("", "bias", "scaled RoPE"))
        lines.append(f"| {backend.title} | {layer} | {backend.source} | {backend.shown} |")
    assert spec.attention_bias, "the counts are of a draft with biases"
    return "\n".join(lines)
