# SPDX-License-Identifier: Apache-2.0
"""Both graphs against the float64 equations, 1e-5 relative: every dialect, window and context length."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch

from dflash_trt.engine.graph.onnx_builder import COMPUTE
from dflash_trt.runtime.drafter.onnxruntime import packed_linear
from tests.engines import Graphs, build
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import ReferenceDrafter
from tests.reference.synthetic import write_random_draft

RELATIVE = 1e-5
WINDOW = 7


@dataclass(frozen=True)
class Case:
    """A draft checkpoint: a fixture, or what write_random_draft writes with these options."""

    name: str
    options: dict[str, Any] | None = None

    def path(self, directory: Path) -> Path:
        return FIXTURES / self.name if self.options is None else write_random_draft(directory, **self.options)


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = [
    Case("tiny-gpt-oss-dflash"),
    Case("tiny-qwen3-dflash"),
    Case("gpt_oss", {"dialect": "gpt_oss"}),
    Case("float16", {"dialect": "gpt_oss", "dtype": torch.float16}),
    Case("float32", {"dialect": "qwen3", "dtype": torch.float32}),
    Case("window", {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": WINDOW, "is_causal": False}),
    Case("causal", {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": WINDOW, "is_causal": True}),
    # Sliding layers are causal and full ones are not where the checkpoint does not say.
    Case("mixed", {"dialect": "gpt_oss", "layer_types": SLIDING, "sliding_window": WINDOW}),
]
EngineMaker = Callable[[Case], tuple[Graphs, ReferenceDrafter]]


@pytest.fixture(scope="module", params=[1, 2**40], ids=["packed", "float"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineMaker:
    """Every matrix as it is stored, and every one in FLOAT."""
    made: dict[str, tuple[Graphs, ReferenceDrafter]] = {}

    def make(case: Case) -> tuple[Graphs, ReferenceDrafter]:
        if case.name not in made:
            directory = tmp_path_factory.mktemp(case.name)
            draft = case.path(directory / "draft")
            build(draft, directory / "engine")
            with patch.object(packed_linear, "MIN_PACKED", request.param):
                made[case.name] = Graphs(directory / "engine"), ReferenceDrafter.load(draft)
        return made[case.name]

    return make


def features(graphs: Graphs, rows: int, seed: int = 0) -> np.ndarray:
    """Random taps; one channel is large, as in real targets (trap 6)."""
    taps = np.random.default_rng(seed).standard_normal((rows, graphs.spec.target_hidden_size))
    taps[:, 3] *= 300
    return taps.astype(np.float32)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    if expected.size == 0:
        return
    error = np.abs(actual - expected)
    worst = np.unravel_index(error.argmax(), error.shape)
    bound = RELATIVE * np.abs(expected).max()
    assert error[worst] <= bound, f"at {worst}: {actual[worst]} instead of {expected[worst]}, bound {bound}"


def order_of(reference: ReferenceDrafter) -> list[int]:
    """Order of a head's dimensions in the context cache: those that turn first, in two halves."""
    D, R = reference.head_dim, reference.rotary_dim or reference.head_dim
    pairs = [(2 * i, 2 * i + 1) if reference.rotary.interleaved else (i, i + R // 2) for i in range(R // 2)]
    pairs += [(i, i + (D - R) // 2) for i in range(R, (R + D) // 2)]
    return [first for first, _ in pairs] + [second for _, second in pairs]


def compare_context(graphs: Graphs, reference: ReferenceDrafter, begin: int) -> None:
    """Context rows from position `begin` on."""
    taps, positions = features(graphs, 9), np.arange(begin, begin + 9)
    k, v = graphs.context(taps, positions)
    expected_k, expected_v = reference.context_kv(taps.astype(np.float64), positions)
    # Layer by layer: another layer's k_norm (trap 8) must not be masked by a larger layer.
    for layer in range(len(graphs.spec.layers)):
        assert_close(k[:, layer], expected_k[:, layer][..., order_of(reference)])
        assert_close(v[:, layer], expected_v[:, layer])


def compare_draft(graphs: Graphs, reference: ReferenceDrafter, length: int) -> None:
    """A block after `length` context rows."""
    S, H = graphs.spec.block_size, graphs.spec.hidden_size
    noise = np.random.default_rng(length).standard_normal((S, H)).astype(np.float32)
    k, v = reference.context_kv(features(graphs, length).astype(np.float64), np.arange(length))
    expected = reference.draft(noise.astype(np.float64), k, v, np.arange(length, length + S))
    caches = cache_of(graphs, [k[..., order_of(reference)]], length + 5), cache_of(graphs, [v], length + 5)
    assert_close(graphs.draft(noise[None], caches, [0], [length])[0], expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_context_kv(engine: EngineMaker, case: Case) -> None:
    for begin in (0, 255, 1000):  # the rope tables meet at multiples of 256
        compare_context(*engine(case), begin)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draft_hidden(engine: EngineMaker, case: Case) -> None:
    graphs, reference = engine(case)
    for length in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, graphs.spec.block_size + WINDOW, 300):
        compare_draft(graphs, reference, length)


def cache_of(graphs: Graphs, requests: list[np.ndarray], capacity: int) -> np.ndarray:
    """Caches [slots, L, C_max, G, D] of context rows [C, L, G, D]; what no row fills is NaN: it is never read."""
    shape = (len(requests), *requests[0].shape[1:2], capacity, *requests[0].shape[2:])
    cache = np.full(shape, np.nan, dtype=np.float32)
    for slot, rows in enumerate(requests):
        cache[slot, :, : len(rows)] = rows.swapaxes(0, 1)
    return cache


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=lambda case: case.name)
def test_a_batch_is_its_requests(engine: EngineMaker, case: Case) -> None:
    """Ragged context lengths and permuted slots: each request as if it were alone."""
    graphs, reference = engine(case)
    S, H = graphs.spec.block_size, graphs.spec.hidden_size
    slots, lengths = [2, 0, 3], [11, 0, 4]
    noise = np.random.default_rng(1).standard_normal((3, S, H)).astype(np.float32)
    contexts = [reference.context_kv(features(graphs, n, seed=n).astype(np.float64), np.arange(n)) for n in lengths]
    requests = [np.zeros((0, *contexts[0][0].shape[1:]))] * 4
    caches = []
    for kv in range(2):
        for slot, context in zip(slots, contexts, strict=True):
            requests[slot] = context[kv]
        # Rows beyond a request's own length are read where another request is longer, and must not count.
        caches.append(np.nan_to_num(cache_of(graphs, requests, capacity=16), nan=1e3))
    hidden = graphs.draft(noise, (caches[0], caches[1]), slots, lengths)
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        positions = np.arange(length, length + S)
        assert_close(hidden[row], reference.draft(noise[row].astype(np.float64), *context, positions))


def test_rope_is_exact_at_the_last_position(engine: EngineMaker) -> None:
    """Where float32 angles would be wrong by 1e-3."""
    graphs, reference = engine(CASES[0])
    last = graphs.spec.max_position_embeddings - 1
    taps, positions = features(graphs, 3), np.array([last - 2, last - 1, last])
    k, _ = graphs.context(taps, positions)
    assert_close(k, reference.context_kv(taps.astype(np.float64), positions)[0])


@pytest.mark.parametrize("engine", [1], indirect=True, ids=["packed"])
def test_a_block_reaches_beyond_the_last_position(engine: EngineMaker) -> None:
    graphs, reference = engine(CASES[1])
    compare_draft(graphs, reference, graphs.spec.max_position_embeddings - 1)


def test_fc_beyond_fp16(engine: EngineMaker) -> None:
    """Taps of 2e4 (Qwen3-8B's) in an FP16 checkpoint: fc's sums exceed FP16's largest number, and nothing is lost."""
    case = next(case for case in CASES if case.name == "float16")
    graphs, reference = engine(case)
    weight = reference.tensors["fc.weight"]
    taps = (2e4 * np.sign(weight[:3])).astype(np.float32)  # each row as large as one output channel can make it
    assert np.abs(reference.linear("fc", taps.astype(np.float64))).max() > np.finfo(np.float16).max
    k, v = graphs.context(taps, np.arange(3))
    expected_k, expected_v = reference.context_kv(taps.astype(np.float64), np.arange(3))
    assert_close(k, expected_k)
    assert_close(v, expected_v)
    assert COMPUTE == onnx.TensorProto.BFLOAT16  # TensorRT's type for it: FP16 weights are cast
    model = onnx.load(graphs.directory / "context.onnx", load_external_data=False)
    half = {i.name for i in model.graph.initializer if i.data_type == onnx.TensorProto.FLOAT16}
    assert "fc.weight" in half
    readers = {node.op_type for node in model.graph.node if half & set(node.input)}
    assert readers == {"Cast"}
