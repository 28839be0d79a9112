# SPDX-License-Identifier: Apache-2.0
"""Scales: which layers share one, how ranges determine them, bounds used instead of ranges, and the cache's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.quantize.scales import scale_groups, scale_of
from tests.checkpoint.dialect_samples import WRITERS
from tests.checkpoint.samples import refusal
from tests.engine.graph.test_features import TRUTH
from tests.paths import FIXTURES
from tests.quantize.samples import arrays, convert
from tests.reference.dflash_float64 import ReferenceDrafter
from tests.reference.synthetic import write_random_draft


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe("nvfp4+fp8-kv"), tmp_path / "draft")
    return tmp_path / "draft"


def test_they_are_read(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    checkpoint = read_draft(draft)
    for kv in "kv":
        names = [f"layers.{i}.self_attn.{kv}_proj.{kv}_scale" for i in range(checkpoint.spec.num_layers)]
        assert checkpoint.cache_scales(kv) == tuple(float(tensors[name]) for name in names)
    assert set(checkpoint.cache_scales("k") + checkpoint.cache_scales("v")) != {1.0}


def test_a_claim_that_the_tensors_do_not_bear_out(draft: Path) -> None:
    file = draft / "hf_quant_config.json"
    document = json.loads(file.read_text())
    del document["quantization"]["kv_cache_quant_algo"]
    file.write_text(json.dumps(document))
    assert (
        f"{file}: quantization.kv_cache_quant_algo: expected FP8 (k_scale and v_scale tensors), found None"
        in refusal(lambda: read_draft(draft))
    )


def test_scale_groups() -> None:
    spec = read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec
    groups = scale_groups(spec)
    a = "layers.0.self_attn", "layers.1.self_attn"
    assert groups == [
        tuple(f"{x}.{p}_proj" for x in a for p in "qkv"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
        ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"),
        ("fc",),
        ("layers.0.self_attn.o_proj",),
        ("layers.0.mlp.down_proj",),
        ("layers.1.self_attn.o_proj",),
        ("layers.1.mlp.down_proj",),
    ]


def test_scales_from_ranges(tmp_path: Path) -> None:
    """Layers of one GEMM store the widest of their input ranges: q, k and v of all layers; gate and up."""
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash")
    inputs = {module: 1.0 + index for index, module in enumerate(draft.spec.linear_modules())}
    ranges = Ranges(inputs=inputs, k=(3.0, 4.0), v=(5.0, 0.0))
    case = convert(draft.directory, tmp_path / "q", "mixed-nvfp4-fp8+fp8-kv", ranges=ranges)
    tensors, algorithms = arrays(case.quantised.directory), case.quantised.quantization.modules
    for group in scale_groups(draft.spec):
        for module in (m for m in group if m in algorithms):
            widest = max(inputs[m] for m in group if algorithms.get(m) == algorithms[module])
            divisor = np.float32(448 if algorithms[module] == "FP8" else 2688)
            assert tensors[f"{module}.input_scale"] == np.float32(widest) / divisor, module
    for i, (k, v) in enumerate([(3.0, 5.0), (4.0, 448.0)]):  # a range of 0: modelopt's stand-in
        attention = f"layers.{i}.self_attn"
        assert tensors[f"{attention}.k_proj.k_scale"] == np.float32(k) / np.float32(448)
        assert tensors[f"{attention}.v_proj.v_scale"] == np.float32(v) / np.float32(448)
    for algorithm in ("FP8", "NVFP4"):
        assert scale_of(algorithm, 2.0**-149) > 0, "a subnormal range, which division would make 0"


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -1.0])
def test_range_that_is_none(tmp_path: Path, bad: float | None) -> None:
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash")
    inputs = dict.fromkeys(draft.spec.linear_modules(), 1.0)
    del inputs["layers.1.mlp.down_proj"]
    if bad is not None:
        inputs["layers.1.mlp.down_proj"] = bad
    with pytest.raises(CheckpointError) as caught:
        convert(draft.directory, tmp_path / "q", "nvfp4", ranges=Ranges(inputs=inputs, k=(1.0, 1.0), v=(1.0, 1.0)))
    assert caught.value.message == (
        "calibration ranges: layers.1.mlp.down_proj: expected the largest magnitude of its input,"
        f" found {'none' if bad is None else bad}"
    )
    assert "dflash-trt capture" in str(caught.value.hint)


def test_fc_has_no_bound_without_calibration(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("description: all\nrules:\n  - {modules: '*', algorithm: FP8}\n")
    with pytest.raises(CheckpointError, match=r"ranges: fc: expected the largest magnitude .* found none"):
        convert(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "q", str(own))


class Recording(ReferenceDrafter):
    """The equations, and the largest magnitude of every linear layer's input."""

    def linear(self, name: str, x: Any) -> Any:
        SEEN[name] = max(SEEN.get(name, 0.0), float(np.abs(x).max()))
        return super().linear(name, x)


SEEN: dict[str, float] = {}


def recording(reference: ReferenceDrafter) -> Recording:
    SEEN.clear()
    return Recording(**{name: getattr(reference, name) for name in reference.__dataclass_fields__})


def check_bounds(ranges: Ranges, k: Any, v: Any) -> None:
    """No input that was seen, nor a row of K or V, exceeds its bound."""
    for module, largest in SEEN.items():
        if module != "fc":
            assert largest <= ranges.inputs[module] * (1 + 1e-6), module
    assert (np.abs(k).max(axis=(0, 2, 3)) <= np.array(ranges.k) * (1 + 1e-6)).all()
    assert (np.abs(v).max(axis=(0, 2, 3)) <= np.array(ranges.v) * (1 + 1e-6)).all()


@pytest.mark.parametrize("dialect", ["gpt_oss", "qwen3"])
def test_bounds_hold_for_adversarial_features(dialect: Any, tmp_path: Path) -> None:
    """Rows that point where a weight row points come close to its bound, and none exceeds it."""
    draft = read_draft(write_random_draft(tmp_path, dialect=dialect))
    ranges, spec = ranges_from_weights(draft), draft.spec
    drafter, rng = recording(ReferenceDrafter.load(tmp_path)), np.random.default_rng(0)
    tensors = drafter.tensors
    v_weight = tensors["layers.0.self_attn.v_proj.weight"]
    norm = np.maximum(tensors["hidden_norm.weight"], tensors["layers.0.input_layernorm.weight"])
    rows = np.concatenate([v_weight * norm, 100 * np.eye(spec.hidden_size), rng.normal(size=(64, spec.hidden_size))])
    fc = np.linalg.pinv(tensors["fc.weight"])
    k, v = drafter.context_kv(rows @ fc.T, np.arange(len(rows)))
    for begin in range(0, len(rows) - spec.block_size, spec.block_size):
        block = rows[begin : begin + spec.block_size]
        drafter.draft(block, k, v, np.arange(len(rows), len(rows) + len(block)))
    check_bounds(ranges, k, v)
    assert SEEN["layers.0.self_attn.k_proj"] > 0.9 * ranges.inputs["layers.0.self_attn.k_proj"]
    assert np.abs(v[:, 0]).max() > 0.5 * ranges.v[0]


@pytest.mark.parametrize("name", ["laguna", "mimo"])
def test_bounds_hold_with_a_gate_and_a_factor_on_v(name: str, tmp_path: Path) -> None:
    """Blocks that point where rows of V and of the gate point."""
    convert(WRITERS[name](tmp_path / "draft"), tmp_path / "plain", "bf16")
    draft = read_draft(tmp_path / "plain")
    ranges, spec = ranges_from_weights(draft), draft.spec
    drafter = recording(ReferenceDrafter.load(tmp_path / "plain", TRUTH[name]))
    taps = np.random.default_rng(0).normal(size=(9, spec.target_hidden_size))
    k, v = drafter.context_kv(taps, np.arange(9))
    norm = drafter.tensors["layers.0.input_layernorm.weight"]
    for x in "vg" if spec.tap_norms else "v":
        for row in drafter.tensors[f"layers.0.self_attn.{x}_proj.weight"] * norm:
            drafter.draft(np.tile(100 * row, (spec.block_size, 1)), k, v, np.arange(9, 9 + spec.block_size))
    check_bounds(ranges, k, v)
    assert SEEN["layers.0.self_attn.o_proj"] > 0.05 * ranges.inputs["layers.0.self_attn.o_proj"]
