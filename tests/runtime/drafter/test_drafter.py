# SPDX-License-Identifier: Apache-2.0
"""Slots and context of a drafter against the two graphs called one by one with a cache in numpy; and who runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dflash_trt import _C
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans.plan import Plan
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import choose_executor, open_drafter
from dflash_trt.runtime.drafter.torch_executor import TorchExecutor
from dflash_trt.runtime.kvcache.page_memory import FIRST_PAGES
from tests.checkpoint.samples import refusal
from tests.contract.host_runtime import VERSIONS
from tests.contract.machine import pretend
from tests.decoding import Tables, hidden_of
from tests.engines import Graphs, build
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES
from tests.quantize.samples import unpacked_fp8, unpacked_nvfp4

PLAN = Plan(
    file="draft.plan", made_from={}, runtime="tensorrt", version=VERSIONS[0], gpu="NVIDIA H200",
    compute_capabilities=("9.0",), plugin_sha256=None, workspace_bytes=1, hardware_compatibility="none",
    version_compatible=False, profiles=(),
)  # fmt: skip


@pytest.fixture
def manifest(engine: Path) -> Manifest:
    return read_manifest(engine)


@pytest.fixture
def planned(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, plans={"context": PLAN, "draft": PLAN})


def test_onnx_runtime_on_a_cpu(engine: Path, manifest: Manifest) -> None:
    drafter = open_drafter(engine, manifest, num_slots=3, device="cpu", expose=["layers.0/output"])
    assert isinstance(drafter.executor, OnnxExecutor)
    assert len(drafter.cache.lengths) == 3
    blocks = torch.zeros(2, manifest.draft.block_size, manifest.draft.hidden_size)
    outputs = drafter.run([0, 1], blocks)
    assert {name: value.shape for name, value in outputs.items()} == dict.fromkeys(outputs, blocks.shape)
    assert list(outputs) == ["hidden", "layers.0/output"]


def test_on_a_gpu_torch_where_there_are_no_plans(engine: Path, manifest: Manifest, planned: Manifest) -> None:
    half = msgspec.structs.replace(planned, plans={"draft": PLAN})
    for of, expose in ((manifest, ()), (half, ()), (planned, ("layers.0/output",))):  # plans return no such value
        executor = choose_executor(engine, of, device="cuda:1", expose=expose)
        assert isinstance(executor, TorchExecutor)
        assert executor.device == torch.device("cuda:1")


def test_on_a_gpu_plans_where_there_are_some(
    engine: Path, planned: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    executor = choose_executor(engine, planned, device="cuda:1")
    assert isinstance(executor, TensorRTExecutor)
    assert executor.device == torch.device("cuda:1")
    assert isinstance(choose_executor(engine, planned, device="cuda:1", executor="torch"), TorchExecutor)


def test_plans_without_tensorrt_are_no_reason_for_another_executor(engine: Path, planned: Manifest) -> None:
    message = refusal(lambda: choose_executor(engine, planned, device="cuda").load(), MissingDependencyError)
    assert "expected the package tensorrt 10.15 or newer" in message


@pytest.mark.parametrize(("executor", "device", "other"), [("onnxruntime", "cuda", "cpu"), ("tensorrt", "cpu", "cuda")])
def test_an_executor_without_that_device(
    executor: str, device: str, other: str, engine: Path, planned: Manifest
) -> None:
    message = refusal(lambda: choose_executor(engine, planned, device=device, executor=executor), EngineError)
    assert f"executor {executor}: expected device {other}, found {device}" in message
    assert f"--device {other}" in message


ROWS, H = 300, 128
INPUT_SCALE = 0.05


def quantised(algorithm: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The head's tensors as modelopt writes them, and the weights that they stand for."""
    codes = np.empty((ROWS, H), np.uint8)
    scale = torch.tensor(0.01)
    tensors = {"lm_head.input_scale": torch.tensor(INPUT_SCALE)} if algorithm != "W4A16_NVFP4" else {}
    if algorithm == "FP8":
        _C.pack_fp8(weight, 0.01, codes)
        expected = unpacked_fp8(codes, 0.01)
        weights = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": scale}
    else:
        packed, scales = np.empty((ROWS, H // 2), np.uint8), np.empty((ROWS, H // 16), np.uint8)
        _C.pack_nvfp4(weight, 0.01, packed, scales)
        expected = unpacked_nvfp4(packed, scales, 0.01)
        block_scales = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        weights = {"weight": torch.from_numpy(packed), "weight_scale": block_scales, "weight_scale_2": scale}
    return tensors | {f"lm_head.{name}": tensor for name, tensor in weights.items()}, expected


def with_head(directory: Path, algorithm: str | None) -> tuple[DraftCheckpoint, np.ndarray, torch.Tensor]:
    """The draft, the weights of its head, and the tokens of its rows."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(1024, generator=generator)[:ROWS]
    weight = torch.randn(ROWS, H, generator=generator).bfloat16().float()
    tensors, expected = {"lm_head.weight": weight.bfloat16()}, weight.numpy()
    if algorithm is not None:
        tensors, expected = quantised(algorithm, weight.numpy())
    tensors["d2t"] = tokens - torch.arange(ROWS)
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", directory, {"draft_vocab_size": ROWS}, tensors)
    modules = {} if algorithm is None else {"lm_head": algorithm}
    return (
        msgspec.structs.replace(draft, quantization=Quantization(modules=modules, fp8_kv_cache=False)),
        expected,
        tokens,
    )


@pytest.mark.parametrize("algorithm", [None, "FP8", "W4A16_NVFP4"])
def test_proposals_are_the_argmax_of_hidden(algorithm: str | None, tmp_path: Path) -> None:
    draft, weight, tokens = with_head(tmp_path / "draft", algorithm)
    manifest = build_featured(draft, tmp_path / "engine")
    drafter = open_drafter(tmp_path / "engine", manifest, num_slots=2)
    generator = torch.Generator().manual_seed(4)
    drafter.inject([0, 1], [5, 2], torch.randn(7, draft.spec.target_hidden_size, generator=generator))
    blocks = torch.randn(2, draft.spec.block_size, H, generator=generator)
    outputs = drafter.run([1, 0], blocks)
    hidden = outputs["hidden"][:, 1:]
    if algorithm == "FP8":  # quantises the input, too, by the static scale
        hidden = (hidden / INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * INPUT_SCALE
    best = (hidden.double() @ torch.from_numpy(weight).double().T).argmax(dim=-1)
    assert torch.equal(outputs["token_ids"].long(), tokens[best])
    assert best.unique().numel() > 5


NUM_SLOTS = 3
FIRST_ROWS = FIRST_PAGES * TOKENS_PER_PAGE
"""Rows that a new cache has room for."""


class Expected:
    """Rows and lengths by the book: one call of context.onnx for each slot, one of draft.onnx for each block."""

    def __init__(self, engine: Path) -> None:
        self._graphs = Graphs(engine)
        spec = self._graphs.spec
        shape = (NUM_SLOTS, len(spec.layers), 5 * FIRST_ROWS, spec.num_key_value_heads, spec.head_dim)
        self._caches = (np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32))
        self.lengths = [0] * NUM_SLOTS

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor) -> None:
        begin = 0
        for slot, count in zip(slots, num_rows, strict=True):
            rows = slice(self.lengths[slot], self.lengths[slot] + count)
            kv = self._graphs.context(taps[begin : begin + count].numpy(), np.arange(rows.start, rows.stop))
            for cache, new in zip(self._caches, kv, strict=True):
                cache[slot, :, rows] = new.transpose(1, 0, 2, 3)
            self.lengths[slot] += count
            begin += count

    def draft(self, slots: Sequence[int], blocks: torch.Tensor) -> torch.Tensor:
        hidden = [
            self._graphs.draft(block[None].numpy(), self._caches, [slot], [self.lengths[slot]])
            for slot, block in zip(slots, blocks, strict=True)
        ]
        return torch.from_numpy(np.concatenate(hidden))


@pytest.fixture
def engine(draft_dir: Path, tmp_path: Path) -> Path:
    build(draft_dir, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def drafter(engine: Path) -> Drafter:
    return open_drafter(engine, read_manifest(engine), num_slots=NUM_SLOTS)


def step(
    drafter: Drafter, expected: Expected, context: dict[int, int], slots: Sequence[int], random: torch.Generator
) -> None:
    """Injects `context` rows by slot and drafts for `slots`, with both."""
    taps = torch.randn(sum(context.values()), drafter.spec.target_hidden_size, generator=random)
    blocks = torch.randn(len(slots), drafter.spec.block_size, drafter.spec.hidden_size, generator=random)
    for either in (drafter, expected):
        either.inject(list(context), list(context.values()), taps)
    assert drafter.cache.lengths == expected.lengths
    torch.testing.assert_close(hidden_of(drafter, slots, blocks), expected.draft(slots, blocks), rtol=1e-4, atol=1e-4)


def test_slots_grow_at_their_own_pace(engine: Path, drafter: Drafter) -> None:
    expected, random = Expected(engine), torch.Generator().manual_seed(0)
    step(drafter, expected, {0: 5, 2: 31}, [0, 2], random)
    step(drafter, expected, {1: 1}, [1], random)
    step(drafter, expected, {2: 1, 0: 4, 1: 3}, [2, 0, 1], random)
    step(drafter, expected, {0: 2}, [1, 2], random)  # a slot without new rows keeps its own
    drafter.release(2)
    expected.lengths[2] = 0
    step(drafter, expected, {2: 7}, [0, 2, 1], random)
    step(drafter, expected, {1: 0}, [1, 1], random)
    step(drafter, expected, {}, [0], random)


def test_the_cache_grows_with_what_it_holds(engine: Path, drafter: Drafter) -> None:
    """Twice, once by half and once to more; the executor reads the new one, and pages that lie anywhere."""
    expected, random = Expected(engine), torch.Generator().manual_seed(1)
    drafter.reserve(0, list(range(200, 240)), 0)
    step(drafter, expected, {1: FIRST_ROWS}, [1], random)
    assert len(drafter.cache.k) == FIRST_PAGES
    step(drafter, expected, {1: 1}, [1], random)
    assert len(drafter.cache.k) == FIRST_PAGES + FIRST_PAGES // 2
    step(drafter, expected, {0: FIRST_ROWS + 9, 1: 1}, [0, 1], random)
    assert len(drafter.cache.k) == 200 + FIRST_PAGES + 1


def test_pages_in_any_order_are_one_context(engine: Path, drafter: Drafter) -> None:
    """Blocks of one batch read 1, 3 and no pages."""
    expected, random = Expected(engine), torch.Generator().manual_seed(2)
    drafter.reserve(0, [7, 2, 5], 0)
    drafter.reserve(2, [3, 0], 0)
    step(drafter, expected, {0: 2 * TOKENS_PER_PAGE - 1}, [0, 1], random)
    step(drafter, expected, {0: 2, 2: TOKENS_PER_PAGE}, [2, 0, 1], random)
    step(drafter, expected, {2: 1}, [0, 2], random)


def test_a_page_of_another_is_zeros_again(drafter: Drafter) -> None:
    """A masked row contributes 0 * value, and rows of an earlier request may be NaN."""
    width, blocks = drafter.spec.target_hidden_size, torch.ones(2, drafter.spec.block_size, drafter.spec.hidden_size)
    drafter.reserve(0, [0, 1], 0)
    drafter.inject([0], [2 * TOKENS_PER_PAGE], torch.full((2 * TOKENS_PER_PAGE, width), torch.nan))
    drafter.release(0)
    drafter.reserve(1, [1], 0)
    drafter.inject([1], [3], torch.ones(3, width))
    drafter.reserve(2, [5, 3], 0)
    drafter.inject([2], [TOKENS_PER_PAGE + 1], torch.ones(TOKENS_PER_PAGE + 1, width))
    assert hidden_of(drafter, [1, 2], blocks).isfinite().all()


def test_a_cache_that_grew_while_decoding_is_cleared_by_anybody(drafter: Drafter) -> None:
    """The loop injects in torch's inference mode; pages of a new request are reserved outside of it."""
    num_rows = FIRST_ROWS + 1
    with torch.inference_mode():
        drafter.inject([0], [num_rows], torch.randn(num_rows, drafter.spec.target_hidden_size))
    drafter.release(0)
    drafter.reserve(1, list(range(FIRST_PAGES + 1)), 0)
    assert drafter.cache.lengths[0] == 0
    assert not drafter.cache.k.any()


def test_the_memory_of_a_row(drafter: Drafter) -> None:
    cache = drafter.cache
    assert cache.k.nbytes + cache.v.nbytes == FIRST_ROWS * drafter.cache_bytes_per_token


def test_a_borrowed_head_reads_the_dtype_that_the_embedding_has(drafter: Drafter) -> None:
    """A target in BF16 takes no rows in FLOAT."""
    generator = torch.Generator().manual_seed(0)
    target = Tables(*torch.randn(2, 4096, drafter.spec.hidden_size, generator=generator).bfloat16())
    drafter.borrow(target)
    (proposals,) = drafter.propose([0], [5], 3)
    blocks = target.embed(torch.tensor([[5] + [drafter.spec.mask_token_id] * (drafter.spec.block_size - 1)]))
    hidden = hidden_of(drafter, [0], blocks)
    assert hidden.dtype == torch.float32
    assert proposals.token_ids == target.logits(hidden[0, 1:4].bfloat16()).argmax(-1).tolist()


def test_context_of_a_slot(drafter: Drafter) -> None:
    spec = drafter.spec
    taps = torch.randn(5, spec.target_hidden_size)
    drafter.inject([1, 0], [3, 2], taps)
    k, v = drafter.executor.context(taps[:3], torch.arange(3))["kv"].unbind(1)
    found = drafter.cache.rows(1)
    assert torch.equal(found[0], k.transpose(0, 1))
    assert torch.equal(found[1], v.transpose(0, 1))
    drafter.release(1)
    assert drafter.cache.rows(1)[0].shape == (len(spec.layers), 0, spec.num_key_value_heads, spec.head_dim)
