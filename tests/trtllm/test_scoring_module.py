# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's drafter in the worker that asks for it: drafts are those of our own walk."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.device import launcher
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import Session
from dflash_trt.trtllm.registration import build_draft_model
from dflash_trt.trtllm.scoring_module import LilicorrEngineDrafter
from tests.checkpoint.samples import edit_config
from tests.contract.drafter_contract import contract_data
from tests.contract.host_runtime import VERSIONS
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.decoding import greedy, open_trained
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.trtllm.worker import Trace, Worker, decode, draft_config, engine_of, share

TARGET = FIXTURES / "tiny-qwen3"
SIZES = DraftSizes(
    hidden=128, vocab_size=1024, num_target_layers=4, block_size=8, num_heads=4, num_kv_heads=2, head_dim=64
)
BATCH, CONTEXT, STEPS = 3, 240, 6


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    directory = tmp_path_factory.mktemp("lilicorr")
    draft = write_random_draft(directory / "draft", dialect="qwen3", lilicorr="convolved", sizes=SIZES)
    edit_config(draft, dflash_config__target_layer_ids=[0, 1, 2])
    build(draft, directory / "engine", TARGET)
    return open_trained(TARGET.name, directory / "engine", max_batch_size=BATCH)


def traces(session: Session, num_drafts: int, executor: Executor | None = None) -> list[Trace]:
    spec = session.manifest.draft
    executor = executor or OnnxExecutor(engine_of(session), session.manifest)
    drafter = LilicorrEngineDrafter(draft_config(spec), spec, executor, engine_of(session))
    share(drafter, session.target)
    worker = Worker(drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=num_drafts, generation="8d62b3e5")
    ours = open_drafter(engine_of(session), session.manifest, num_slots=BATCH)
    return decode(worker, session.target, ours, [ids[:60] for ids in prompts(session)[:BATCH]], STEPS)


@pytest.mark.parametrize("num_drafts", [7, 2])
def test_drafts_are_those_of_our_own_walk(session: Session, num_drafts: int) -> None:
    found = traces(session, num_drafts)
    for prompt, trace in zip(prompts(session), found, strict=False):
        assert trace.token_ids == session.generate_plain(prompt[:60], greedy(len(trace.token_ids))).token_ids
        if num_drafts == 7:  # ours, cut to two of seven, has seen all slots
            assert trace.drafts == trace.expected_drafts
    assert len({draft for trace in found for drafts in trace.drafts for draft in drafts}) > 10


@pytest.mark.parametrize("wrong", range(4))
def test_each_argument_counts(wrong: int, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of another slot or request gives other drafts."""
    honest = LilicorrEngineDrafter.select_lilicorr_path

    def mistaken(self: LilicorrEngineDrafter, *given: torch.Tensor) -> torch.Tensor:
        return honest(self, *(each.roll(1, 0) if i == wrong else each for i, each in enumerate(given)))

    monkeypatch.setattr(LilicorrEngineDrafter, "select_lilicorr_path", mistaken)
    assert any(trace.drafts != trace.expected_drafts for trace in traces(session, 7))


def test_plans_on_the_recorded_tensorrt(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime computes the three plans, with inputs and outputs in BF16; a batch is larger than a call takes."""
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = copytree(engine_of(session), tmp_path / "engine")
    room = CONTEXT + SIZES.block_size
    manifest = add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=room, max_num_tokens=24))
    assert {*manifest.plans} == {"context", "draft", "correlator"}
    for num_drafts in (7, 2):
        found = traces(session, num_drafts, TensorRTExecutor(engine, manifest, HostLauncher()))
        for prompt, trace in zip(prompts(session), found, strict=False):
            assert trace.token_ids == session.generate_plain(prompt[:60], greedy(len(trace.token_ids))).token_ids
        if num_drafts == 7:
            pairs = [
                (ours, theirs)
                for trace in found
                for row, expected in zip(trace.drafts, trace.expected_drafts, strict=True)
                for ours, theirs in zip(row, expected, strict=True)
            ]
            assert sum(ours == theirs for ours, theirs in pairs) > 0.8 * len(pairs)


def test_what_is_registered_builds_it(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of all graphs, and all that the worker asks of the drafter."""
    monkeypatch.setattr(launcher, "CurrentStreamLauncher", HostLauncher)
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = copytree(engine_of(session), tmp_path / "engine")
    add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=CONTEXT, max_num_tokens=24))
    spec_config = SimpleNamespace(attention_backend="VANILLA", speculative_model=str(engine))
    config = draft_config(session.manifest.draft)
    config.pretrained_config.vocab_size = SIZES.vocab_size
    mapping = SimpleNamespace(pp_size=1)
    drafter = build_draft_model(SimpleNamespace(spec_config=spec_config, mapping=mapping), config, None, None)
    assert isinstance(drafter, LilicorrEngineDrafter)
    for use in contract_data().uses["lilicorr"]:
        value = drafter
        for name in use.partition("(")[0].split("."):
            value = getattr(value, name)
        assert value
