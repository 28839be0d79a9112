# SPDX-License-Identifier: Apache-2.0
"""Deployment files: what they may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_trt.deploy.deployment_file import Eagle3, deployment_path, load_deployment, shipped_deployments
from dflash_trt.errors import ConfigError
from tests.deploy.deployments import BUILD_CONFIGS, NAMES

GOOD = "description: mine\ntarget: T\ndraft: D\ngpus: b300x8\npurpose: latency\n"


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return load_deployment(file)


def test_a_handful_of_lines_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + "eagle3: {model: E}\n")
    loaded = load_deployment(file)
    assert (loaded.mode, loaded.recipe, loaded.prefix_reuse, loaded.max_batch_size) == ("native", "bf16", None, None)
    assert loaded.eagle3 == Eagle3(model="E", num_draft_tokens=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "max_batchsize: 8\n", "unknown key max_batchsize"),
        (GOOD + "max_batchsize: 8\n", "(nearest key: max_batch_size)"),
        (GOOD.replace("gpus: b300x8\n", ""), "missing key gpus"),
        (GOOD + "max_batch_size: many\n", "max_batch_size: expected `int | null`, got `str`"),
        (GOOD + "max_batch_size: 0\n", "max_batch_size: expected `int` >= 1, found 0"),
        (GOOD + "num_draft_tokens: 0\n", "num_draft_tokens: expected `int` >= 1"),
        (GOOD + "kv_cache_fraction: 1.5\n", "kv_cache_fraction: expected `float` < 1.0, found 1.5"),
        (GOOD + "eagle3: {model: x, num_draft_tokens: -1}\n", "eagle3.num_draft_tokens: expected `int` >= 1, found -1"),
        (GOOD + "mode: engin\n", "mode: expected one of engine, native, found 'engin' (nearest value: engine)"),
        (GOOD + "draft_attention: TRTLM\n", "(nearest value: TRTLLM)"),
        (GOOD + "eagle3: {num_draft_tokens: 3}\n", "missing key eagle3.model"),
        (GOOD + "prefix_reuse: 'no'\n", "prefix_reuse: expected `bool | null`, got `str`"),
    ],
)
def test_what_is_said_about_a_bad_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message


SHIPPED = "gpt-oss-120b.b300x8.latency"


def test_shipped_deployments_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(shipped_deployments()) == NAMES
    for name in (SHIPPED, f"{SHIPPED}.yaml"):
        assert deployment_path(name) == BUILD_CONFIGS / f"{SHIPPED}.yaml"


def test_what_is_here_comes_before_a_shipped_deployment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`build NAME` writes an engine directory called NAME, which the next command means."""
    monkeypatch.chdir(tmp_path)
    Path(SHIPPED).mkdir()
    assert deployment_path(SHIPPED) is None
    Path(f"{SHIPPED}.yaml").write_text(GOOD)
    assert deployment_path(f"{SHIPPED}.yaml") == Path(f"{SHIPPED}.yaml")
    Path("b.yml").write_text(GOOD)
    assert deployment_path("b.yml") == Path("b.yml")


@pytest.mark.parametrize("name", ["z-lab/gpt-oss-120b-DFlash", "engine", "", "x" * 5000, f"some/{SHIPPED}"])
def test_what_is_no_deployment(name: str) -> None:
    assert deployment_path(name) is None


@pytest.mark.parametrize(
    ("name", "near"), [(f"{SHIPPED}x", f" (nearest name: {SHIPPED})"), (f"{SHIPPED[:-1]}.yaml", SHIPPED), ("q.yml", "")]
)
def test_an_unknown_name_gives_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: neither a path here nor .*{re.escape(near)}") as caught:
        deployment_path(name)
    assert caught.value.hint == "dflash-trt serve-config --list"
