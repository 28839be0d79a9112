# SPDX-License-Identifier: Apache-2.0
"""The room's one entry: what it replaces, what it says of slower ways, and that a runtime works without it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from dflash_trt import _C
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.runtime import session
from dflash_trt.runtime.cpu import accelerate as accelerate_module
from dflash_trt.runtime.cpu.accelerate import accelerate, slow_parts
from dflash_trt.runtime.cpu.paged_attention import PagedPass
from dflash_trt.runtime.session import open_session, run
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, GatheredPass
from tests.decoding import greedy
from tests.engines import trained_engine
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.runtime.targets.families import random_model


@pytest.mark.parametrize("name", ["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def test_without_the_room_a_runtime_decodes_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own layers and attention by torch's operators, drafted and plain."""
    options = RuntimeOptions(max_batch_size=4, device="cpu")

    def decoded() -> list[list[list[int]]]:
        session = open_session(trained_engine(name), str(FIXTURES / name), options)
        asked = prompts(session)[:4]
        decoders = session.decoder(), session.plain_decoder()
        runs = [run(decoder, [session.request(prompt, greedy(24)) for prompt in asked]) for decoder in decoders]
        pass_types.append(session.target._pass_type)  # type: ignore[attr-defined]
        return [[answer.token_ids for answer in answers] for answers in runs]

    pass_types: list[type] = []
    expected = decoded()
    monkeypatch.setattr(session, "accelerate", lambda _: TORCH_OPERATORS)
    for function in ("linear_panels", "linear_bfloat16", "rms_norm"):
        monkeypatch.delattr(_C, function)
    assert decoded() == expected
    assert expected[0] == expected[1], "greedy decoding is lossless"
    assert pass_types == [PagedPass, GatheredPass]


def test_a_model_on_another_device_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = random_model("qwen3")
    before = dict(model.named_modules())
    assert accelerate(model) == TORCH_OPERATORS
    assert dict(model.named_modules()) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_every_linear_layer_of_a_model_in_fp32_is_replaced() -> None:
    model = random_model("qwen3")
    acceleration = accelerate(model)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    assert not acceleration.pads_rows


def with_cpu(monkeypatch: pytest.MonkeyPatch, features: list[str], *, bfloat16: bool, openmp: int) -> None:
    monkeypatch.setattr(_C, "cpu_features", lambda: features)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(accelerate_module, "openmp_team", lambda: (2, openmp))


def test_the_best_cpu_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, ["avx512", "avx2", "scalar"], bfloat16=True, openmp=1)
    assert slow_parts(torch.float32) == slow_parts(torch.bfloat16) == []


@pytest.mark.parametrize(
    ("features", "dtype", "openmp", "message"),
    [
        (["scalar"], torch.float32, 1, "expected a CPU with AVX-512 or AVX2, found neither"),
        (["avx2", "scalar"], torch.bfloat16, 1, "expected a CPU with AVX512-BF16, found avx2"),
        (["avx512", "avx2", "scalar"], torch.bfloat16, 1, "expected a CPU with AVX512-BF16, found avx512"),
        (["avx2", "scalar"], torch.float32, 0, "one of 2 threads is used"),
    ],
)
def test_a_slower_way_is_said_once_at_load(
    features: list[str],
    dtype: torch.dtype,
    openmp: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_cpu(monkeypatch, features, bfloat16=False, openmp=openmp)
    with caplog.at_level(logging.WARNING, "dflash_trt.runtime.cpu"):
        accelerate(random_model("qwen3").to(dtype))
    assert [message in record.getMessage() for record in caplog.records] == [True]
