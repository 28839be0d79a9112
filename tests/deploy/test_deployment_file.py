# SPDX-License-Identifier: Apache-2.0
"""Deployment files: what they may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.deploy.deployment_file import Eagle3, is_config, load_deployment
from dflash_trt.errors import ConfigError

GOOD = "description: mine\ntarget: T\ndraft: D\ngpus: b300x8\npurpose: latency\n"


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return load_deployment(file)


def test_a_handful_of_lines_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + "eagle3: {model: E}\n")
    loaded = load_deployment(file)
    assert (loaded.mode, loaded.recipe, loaded.prefix_reuse, loaded.max_batch_size) == ("native", "bf16", False, None)
    assert loaded.eagle3 == Eagle3(model="E", draft_tokens=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "max_batchsize: 8\n", "max_batchsize: expected only the keys"),
        (GOOD + "max_batchsize: 8\n", "(nearest key: max_batch_size)"),
        (GOOD.replace("gpus: b300x8\n", ""), "expected the key 'gpus'"),
        (GOOD + "max_batch_size: many\n", "max_batch_size: expected `int | null`, got `str`"),
        (GOOD + "max_batch_size: 0\n", "max_batch_size: expected `int` >= 1, found 0"),
        (GOOD + "draft_tokens: 0\n", "draft_tokens: expected `int` >= 1"),
        (GOOD + "kv_cache_fraction: 1.5\n", "kv_cache_fraction: expected `float` < 1.0, found 1.5"),
        (GOOD + "eagle3: {model: x, draft_tokens: -1}\n", "eagle3.draft_tokens: expected `int` >= 1, found -1"),
        (GOOD + "mode: engin\n", "mode: expected one of engine, native, found 'engin' (nearest value: engine)"),
        (GOOD + "draft_attention: TRTLM\n", "(nearest value: TRTLLM)"),
        (GOOD + "eagle3: {draft_tokens: 3}\n", "eagle3: expected the key 'model'"),
        (GOOD + "prefix_reuse: 'no'\n", "prefix_reuse: expected `bool`, got `str`"),
    ],
)
def test_what_is_said_about_a_bad_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message


def test_what_is_a_deployment_file() -> None:
    assert is_config("a/b.yaml")
    assert is_config("b.yml")
    assert not is_config("z-lab/gpt-oss-120b-DFlash")
    assert not is_config("engine")
