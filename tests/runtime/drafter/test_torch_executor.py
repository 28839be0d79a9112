# SPDX-License-Identifier: Apache-2.0
"""A drafter in torch against one on ONNX Runtime, which computes in FLOAT: equal within BF16 rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from dflash_trt.device.launcher import CudaLauncher
from dflash_trt.engine.executor import CorrelatorInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch_executor import TorchExecutor
from tests.contract.cuda_graphs import stand_in
from tests.decoding import greedy
from tests.engines import trained_engine
from tests.fixtures_data import PAIRS, prompts
from tests.runtime.drafter.torch.drafts import MAKERS, Maker, parameters

NUM_SLOTS = 3
STEPS = (([0, 2], [5, 8]), ([1], [33]), ([2, 0, 1], [1, 500, 3]))
"""Slots, and the context rows that each gets before a block: few, one, and more than a call takes."""
NOISY_RUNS = 3
DEVIATIONS = 4
"""Standard deviations of the noise's size from run to run that are chance."""
Results = dict[str, Tensor]


def open_torch(engine: Path, manifest: Manifest, **options: Any) -> Drafter:
    return open_drafter(engine, manifest, num_slots=NUM_SLOTS, executor="torch", **options)


def run(drafter: Drafter, engine: Path) -> Results:
    """Outputs and context of a drafter after STEPS, by name; inputs are values that BF16 holds."""
    spec, generator, results = drafter.spec, torch.Generator().manual_seed(0), Results()

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    for step, (slots, num_rows) in enumerate(STEPS):
        drafter.inject(slots, num_rows, random(sum(num_rows), spec.target_hidden_size))
        blocks = random(len(slots), spec.block_size, spec.hidden_size)
        outputs = drafter.run(slots, blocks)
        results |= {f"{name} {step}": value.clone() for name, value in outputs.items()}
        if (sizes := spec.lilicorr) is not None:
            B, K, k, H = len(slots), spec.num_draft_tokens - step % 2, sizes.top_k, spec.hidden_size
            log_probs = random(B, K, 96).log_softmax(-1).topk(k).values
            inputs = CorrelatorInputs(random(B, K, k, H), log_probs, random(B, K, H), random(B, H))
            results[f"scores {step}"] = drafter.executor.correlate(inputs).clone()
    for slot in range(NUM_SLOTS):
        for name, rows in zip("kv", drafter.cache.rows(slot), strict=True):
            results[f"{name} of slot {slot}"] = rows.float().cpu() * scales_of(drafter, engine, name)
    return {name: value.cpu() for name, value in results.items()}


def scales_of(drafter: Drafter, engine: Path, name: str) -> Tensor:
    """Scales of an FP8 cache by layer; ONNX Runtime's cache has them multiplied out."""
    if drafter.executor.cache_dtype != torch.float8_e4m3fn:
        return torch.ones(1)
    model = onnx.load(engine / "draft.onnx", load_external_data=False)
    found = [{a.name: a.f for a in n.attribute} for n in model.graph.node if n.op_type.endswith("Attention")]
    return torch.tensor([attributes[f"{name}_scale"] for attributes in found])[:, None, None, None]


def noise(found: Results, exact: Results) -> float:
    """Root mean square of the differences, each value in units of its own size; of numbers only."""
    names = [name for name in exact if not name.startswith(("token_ids", "candidate_ids"))]
    shares = [float((found[name].float() - exact[name]).norm() / exact[name].norm()) for name in names]
    return float(np.sqrt(np.mean(np.square(shares))))


def listed_of(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


class Jitter:
    """`Program.run` whose values in BF16 are rounded up or down by chance, in proportion to the distance.

    The mean square of such an error is twice that of rounding to the nearest: u^2 / 6 against u^2 / 12 for a unit u in
    the last place. So its noise bounds what rounding in the same places may do, whatever the graph makes of it; of
    dense drafts it is 1.4 times as large. Codes of FP8 and FP4 flip with either, which makes more of both.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        there = {**program.constants, **values}
        for call in program.calls:
            inputs = [there[name] for name in call.inputs]
            results = call.function(*inputs)
            listed = listed_of(results)
            if listed[0].dtype == torch.bfloat16 and call.is_elementwise:
                wide = [x.float() if x.dtype == torch.bfloat16 else x for x in inputs]
                exact = inputs[0] if call.keywords and call.keywords[0][0] == "to" else call.function(*wide)
                listed = [x.float() for x in listed_of(exact)]
            for name, value, wanted in zip(call.outputs, listed, listed_of(results), strict=True):
                there[name] = self._rounded(value, wanted.dtype)
        return {name: there[name] for name in program.outputs}

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype != torch.bfloat16:
            return x
        bits = x.float().view(torch.int32)
        moved = bits + torch.randint(0, 2**16, x.shape, generator=self._generator).int()
        if x.dtype == torch.bfloat16:  # output of a product or attention, already rounded
            moved = moved + torch.randint(-(2**15), 2**15, x.shape, generator=self._generator).int()
        return (torch.where(x == 0, bits, moved) >> 16 << 16).view(torch.float32).bfloat16()


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def begin(seed: int) -> None:
        noisy = Jitter(seed)
        monkeypatch.setattr(Program, "run", lambda program, values: noisy.run(program, values))

    return begin


def allowed(engine: Path, manifest: Manifest, exact: Results, jitter: Callable[[int], None]) -> float:
    """The noise that chance in the same places may make."""
    found = []
    for seed in range(NOISY_RUNS):
        jitter(seed)
        found.append(noise(run(open_torch(engine, manifest), engine), exact))
    return float(np.mean(found) + DEVIATIONS * np.std(found, ddof=1))


QUICK = ("trimmed head", "fp8+fp8-kv", "mixed-nvfp4-fp8")


@pytest.mark.parametrize("make", parameters(QUICK))
def test_as_onnx_runtime(make: Maker, tmp_path: Path, jitter: Callable[[int], None]) -> None:
    """Every dialect, recipe and head."""
    engine, manifest = tmp_path / "engine", make(tmp_path)
    exact = run(open_drafter(engine, manifest, num_slots=NUM_SLOTS), engine)
    found = run(open_torch(engine, manifest), engine)
    for name in exact:
        if name.startswith(("token_ids", "candidate_ids")):
            assert (found[name] == exact[name]).float().mean() > 0.6, name  # equals in BF16 change places
    assert 0 < noise(found, exact) < allowed(engine, manifest, exact, jitter)


@pytest.mark.parametrize("name", PAIRS)
def test_steps_and_texts_of_a_trained_pair(name: str, sessions: dict[str, Any]) -> None:
    """16 longer texts: tests/gpu/test_decode.py."""
    exact = sessions[name]
    ours = exact.with_drafter(exact.manifest, open_drafter(trained_engine(name), exact.manifest, executor="torch"))
    found, expected = (
        [session.generate(prompt, greedy(48)) for prompt in prompts(session)[:1]] for session in (ours, exact)
    )
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert abs(sum(completion.steps for completion in found) - sum(completion.steps for completion in expected)) <= 1


def on_stand_in(engine: Path, manifest: Manifest) -> Drafter:
    """A drafter that captures graphs, on a CPU."""
    executor = TorchExecutor(engine, manifest, CudaLauncher(torch.device("cpu")))
    return Drafter.open(executor, manifest.draft, num_slots=NUM_SLOTS)


def test_replays_compute_what_calls_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph for each size, captured once, before any input and before the cache has its final address."""
    engine, manifest = tmp_path / "engine", MAKERS["trimmed head"](tmp_path)
    expected = run(open_torch(engine, manifest), engine)
    graphs = stand_in(monkeypatch)
    caplog.set_level("INFO", "dflash_trt.runtime")
    drafter = on_stand_in(engine, manifest)
    for message, sizes in zip(caplog.messages, ([16, 64, 256], [1, 2, 3]), strict=True):
        assert f"ready for {sizes} rows" in message
    assert len(graphs) == 6
    monkeypatch.setattr(Program, "run", None)  # a replay runs no Python of ours
    address = drafter.cache.k.data_ptr()
    found = run(drafter, engine)
    assert drafter.cache.k.data_ptr() != address
    assert len(graphs) == 6
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(graph.replays for graph in graphs)


def test_weights_live_as_long_as_graphs_that_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph holds addresses, but no tensor."""
    engine, manifest = tmp_path / "engine", MAKERS["gpt-oss"](tmp_path)
    stand_in(monkeypatch)
    programs, init = weakref.WeakSet[Program](), Program.__init__

    def noted(self: Program, *args: Any) -> None:
        init(self, *args)
        programs.add(self)

    monkeypatch.setattr(Program, "__init__", noted)
    drafter = on_stand_in(engine, manifest)
    assert len(programs) == 2
    drafter.executor.release()
    assert len(programs) == 1, "of the context"
    drafter.close()
    assert not programs
