# SPDX-License-Identifier: Apache-2.0
"""Decoding with both models compiled by torch.compile, in Inductor's code for a CPU."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.device import fused
from dflash_trt.device.launcher import EagerLauncher
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.session import Session, run
from dflash_trt.runtime.targets.compiled_layers import compile_layers
from dflash_trt.runtime.targets.huggingface import load_model
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, PackedTarget
from tests.decoding import greedy, open_trained
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

pytestmark = pytest.mark.full

NUM_SLOTS = 4


def compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose models are compiled, as a GPU's are, once they run."""
    init = Program.__init__

    def fused_init(self: Program, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.fuse()

    monkeypatch.setattr(Program, "__init__", fused_init)
    monkeypatch.setattr(fused, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(fused, "why_not_compiled", lambda: None)
    monkeypatch.setattr(fused, "FAILED", set())
    torch._dynamo.reset()
    session = opened(name)
    model = load_model(FIXTURES / name, session.manifest.target, session.target.target_layer_ids)
    compile_layers(model)
    session.target = PackedTarget(model, session.target.target_layer_ids, NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    return session


def opened(name: str) -> Session:
    return open_trained(name, device="cpu", executor="torch", max_batch_size=NUM_SLOTS)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt-oss"])
def test_tokens_are_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = opened(name)
    asked = [plain.request(prompt, greedy(48)) for prompt in prompts(plain)[:6]]
    expected = [completion.token_ids for completion in run(plain.plain_decoder(), asked)]
    session = compiled(name, monkeypatch)
    for at_once in (1, NUM_SLOTS):
        requests = [session.request(prompt, greedy(48)) for prompt in prompts(session)[:6]]
        found = run(session.decoder(max_batch_size=at_once), requests)
        assert [completion.token_ids for completion in found] == expected
        assert sum(completion.steps for completion in found) < sum(map(len, expected)) / 2
    assert not fused.FAILED
