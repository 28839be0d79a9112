# SPDX-License-Identifier: Apache-2.0
"""A DFlash2 engine under the worker's calls: the walk of our own runtime, and the target's own tokens."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.engine.plans import launcher
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import Session, open_session
from dflash_trt.trtllm.drafter_module import DFlash2EngineDrafter
from dflash_trt.trtllm.registration import build_draft_model
from tests.checkpoint.samples import edit_config
from tests.contract.drafter_contract import contract_data
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.contract.recorder import VERSIONS
from tests.decoding import greedy
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.trtllm.decoding import Trace, decode
from tests.trtllm.worker import Worker, draft_config, share

BATCH, CONTEXT, STEPS = 3, 240, 8


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session whose head multiplies and caps logits, so that both count."""
    directory = tmp_path_factory.mktemp("dflash2")
    draft = edit_config(
        copytree(FIXTURES / "tiny-qwen3-dflash2", directory / "draft"),
        dflash_config__output_multiplier=0.5, dflash_config__final_logit_softcapping=5.0,
    )  # fmt: skip
    build(draft, directory / "engine", FIXTURES / "tiny-qwen3")
    return open_session(directory / "engine", str(FIXTURES / "tiny-qwen3"), RuntimeOptions(max_batch_size=BATCH))


def engine_of(session: Session) -> Path:
    executor = session.drafter.executor
    assert isinstance(executor, OnnxExecutor)
    return executor._directory


def make_worker(session: Session, num_drafts: int) -> Worker:
    spec = session.manifest.draft
    executor = OnnxExecutor(engine_of(session), session.manifest)
    drafter = DFlash2EngineDrafter(draft_config(spec), spec, executor, engine_of(session))
    share(drafter, session.target)
    return Worker(drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=num_drafts)


def traces(session: Session, worker: Worker) -> list[Trace]:
    drafter = open_drafter(engine_of(session), session.manifest, num_slots=BATCH)
    return decode(worker, session.target, drafter, [ids[:60] for ids in prompts(session)[:BATCH]], STEPS)


@pytest.mark.parametrize("num_drafts", [7, 2])
def test_drafts_are_those_of_our_own_walk(session: Session, num_drafts: int) -> None:
    found = traces(session, make_worker(session, num_drafts))
    for prompt, trace in zip(prompts(session), found, strict=False):
        assert trace.token_ids == session.generate_plain(prompt[:60], greedy(len(trace.token_ids))).token_ids
        assert trace.drafts == trace.expected_drafts
    assert sum(trace.accepted for trace in found) > STEPS


@pytest.mark.parametrize("wrong", ["unary_logits", "block_hidden_states", "anchor_token_ids"])
def test_each_argument_counts(wrong: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of another slot or request gives other drafts."""
    honest = DFlash2EngineDrafter.select_candidate_path
    names = ("unary_logits", "block_hidden_states", "anchor_token_ids")

    def mistaken(self: DFlash2EngineDrafter, logits: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor) -> object:
        return honest(self, logits, ids, *(r.roll(1, 0) if n == wrong else r for n, r in zip(names, rest, strict=True)))

    monkeypatch.setattr(DFlash2EngineDrafter, "select_candidate_path", mistaken)
    found = traces(session, make_worker(session, 7))
    assert any(trace.drafts != trace.expected_drafts for trace in found)


def test_it_has_what_the_worker_asks_for(session: Session) -> None:
    drafter = make_worker(session, 7).drafter
    for use in contract_data().uses["dflash2"]:
        value = drafter
        for name in use.partition("(")[0].split("."):
            value = getattr(value, name)
        assert value


def test_what_is_registered_builds_it(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "CurrentStreamLauncher", HostLauncher)
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = copytree(engine_of(session), tmp_path / "engine")
    add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=CONTEXT, max_num_tokens=24))
    spec_config = SimpleNamespace(attention_backend="VANILLA", speculative_model=str(engine))
    config = draft_config(session.manifest.draft)
    mapping = SimpleNamespace(pp_size=1)
    drafter = build_draft_model(SimpleNamespace(spec_config=spec_config, mapping=mapping), config, None, None)
    assert isinstance(drafter, DFlash2EngineDrafter)
