# SPDX-License-Identifier: Apache-2.0
"""DFlash2's and LiLiCorr's drafters in the workers that ask for them: drafts are those of our own walk."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

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
from dflash_trt.trtllm.scoring_module import DFlash2EngineDrafter, LilicorrEngineDrafter
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
from tests.trtllm.worker import Trace, Worker, decode, draft_config, engine_of, model_config, share

TARGET = FIXTURES / "tiny-qwen3"
SIZES = DraftSizes(
    hidden=128, vocab_size=1024, num_target_layers=4, block_size=8, num_heads=4, num_kv_heads=2, head_dim=64
)
BATCH, CONTEXT, STEPS = 3, 240, 8


def write_dflash2(directory: Path) -> Path:
    """A trained draft whose head multiplies and caps logits, so that both count."""
    facts = {"dflash_config__output_multiplier": 0.5, "dflash_config__final_logit_softcapping": 5.0}
    return edit_config(copytree(FIXTURES / "tiny-qwen3-dflash2", directory), **facts)


def write_lilicorr(directory: Path) -> Path:
    draft = write_random_draft(directory, dialect="qwen3", lilicorr="convolved", sizes=SIZES)
    return edit_config(draft, dflash_config__target_layer_ids=[0, 1, 2])


DRAFTERS = {"dflash2": DFlash2EngineDrafter, "lilicorr": LilicorrEngineDrafter}
WRITERS = {"dflash2": write_dflash2, "lilicorr": write_lilicorr}


class Pair(NamedTuple):
    """A draft that scores candidates, and the fixture target."""

    kind: str
    session: Session


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    build(WRITERS[request.param](directory / "draft"), directory / "engine", TARGET)
    return Pair(request.param, open_trained(TARGET.name, directory / "engine", max_batch_size=BATCH))


def traces(pair: Pair, num_drafts: int, executor: Executor | None = None) -> list[Trace]:
    """All prompts at once; every token is the target's own."""
    session, spec = pair.session, pair.session.manifest.draft
    executor = executor or OnnxExecutor(engine_of(session), session.manifest)
    drafter = DRAFTERS[pair.kind](draft_config(spec), spec, executor, engine_of(session))
    share(drafter, session.target)
    worker = Worker(drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=num_drafts, generation="8d62b3e5")
    ours, texts = open_drafter(engine_of(session), session.manifest, num_slots=BATCH), prompts(session)[:BATCH]
    found = decode(worker, session.target, ours, [ids[:60] for ids in texts], STEPS)
    for prompt, trace in zip(texts, found, strict=True):
        assert trace.token_ids == session.generate_plain(prompt[:60], greedy(len(trace.token_ids))).token_ids
    return found


@pytest.mark.parametrize("num_drafts", [7, 2])
def test_drafts_are_those_of_our_own_walk(pair: Pair, num_drafts: int) -> None:
    found = traces(pair, num_drafts)
    if num_drafts == 7 or pair.kind == "dflash2":  # our LiLiCorr, cut to two of seven, has seen all slots
        assert [trace.drafts for trace in found] == [trace.expected_drafts for trace in found]
    assert len({draft for trace in found for drafts in trace.drafts for draft in drafts}) > 10
    assert sum(trace.accepted for trace in found) > STEPS or pair.kind == "lilicorr"


@pytest.mark.parametrize("pair", ["lilicorr"], indirect=True)
def test_plans_on_the_recorded_tensorrt(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime computes the three plans, with inputs and outputs in BF16; a batch is larger than a call takes."""
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = copytree(engine_of(pair.session), tmp_path / "engine")
    room = CONTEXT + SIZES.block_size
    manifest = add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=room, max_num_tokens=24))
    assert {*manifest.plans} == {"context", "draft", "correlator"}
    for num_drafts in (7, 2):
        found = traces(pair, num_drafts, TensorRTExecutor(engine, manifest, HostLauncher()))
        if num_drafts == 7:
            drafts, expected = (
                torch.tensor(each) for each in ([t.drafts for t in found], [t.expected_drafts for t in found])
            )
            assert (drafts == expected).float().mean() > 0.8


def test_what_is_registered_builds_it(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of all graphs, and all that the worker asks of the drafter."""
    monkeypatch.setattr(launcher, "CurrentStreamLauncher", HostLauncher)
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = copytree(engine_of(pair.session), tmp_path / "engine")
    add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=CONTEXT, max_num_tokens=24))
    config = draft_config(pair.session.manifest.draft)
    config.pretrained_config.vocab_size = SIZES.vocab_size
    drafter: Any = build_draft_model(model_config(engine), config, None, None)
    drafter._build_fused_kv_buffers()
    for use in contract_data().uses[pair.kind]:
        value = drafter
        for name in use.partition("(")[0].split("."):
            value = getattr(value, name)
        assert value
    assert type(drafter) is DRAFTERS[pair.kind]
