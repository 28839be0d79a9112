# SPDX-License-Identifier: Apache-2.0
"""DSpark drafts, each runtime in its own words, and K by the block's layout."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import draft_deployment, resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.errors import ConfigError
from tests.checkpoint.samples import edit_config
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes(
    hidden=128, intermediate=256, num_heads=4, num_kv_heads=2, head_dim=64, num_taps=3, num_target_layers=4,
    block_size=7, vocab_size=1024,
)  # fmt: skip
WORDS: list[tuple[Runtime, str, dict[str, Any]]] = [
    ("vllm", "speculative_config", {"method": "dspark", "num_speculative_tokens": 7}),
    ("sglang", "", {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 7}),
    ("trtllm", "speculative_config", {"decoding_type": "DSpark", "max_draft_len": 7}),
]


def arguments(draft: Path, runtime: Runtime, **facts: object) -> dict[str, Any]:
    """What serve-config writes, without an error by the release's schema and the rules."""
    file = draft_deployment(str(draft), target=str(FIXTURES / "tiny-qwen3"), gpus="b200x1")
    deployment = resolve(msgspec.structs.replace(file, **facts), "x")
    written = render(deployment, runtime, "dflash", host="127.0.0.1", port=8000).arguments
    found = check(deployment_config(deployment, load_schema(runtime, None), written))
    assert [finding for finding in found if finding.severity == ERROR] == []
    return written


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_random_draft(tmp_path / "draft", dialect="qwen3", dspark="vanilla", sizes=SIZES)


@pytest.mark.parametrize(("runtime", "section", "words"), WORDS)
def test_each_runtime_has_its_own_words(runtime: Runtime, section: str, words: dict[str, Any], draft: Path) -> None:
    written = arguments(draft, runtime)
    found = written[section] if section else written
    assert {key: found[key] for key in words} == words
    assert str(draft) in map(str, found.values())


def test_behind_the_anchor_k_is_one_less(draft: Path) -> None:
    edit_config(draft, sample_from_anchor=False)
    assert arguments(draft, "vllm")["speculative_config"]["num_speculative_tokens"] == 6
    assert arguments(draft, "sglang")["speculative_dspark_block_size"] == 6
    with pytest.raises(ConfigError, match=r"expected an anchor-first block, found DSpark .* is not known to serve"):
        arguments(draft, "trtllm")


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "trtllm"])
def test_anchor_first_in_zlabs_layout_is_served_here_alone(runtime: Runtime, tmp_path: Path) -> None:
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=SIZES)
    edit_config(draft, query_zero_predicts_next=True)
    with pytest.raises(ConfigError, match=r"found anchor-first DFlash .* is not known to serve") as refused:
        arguments(draft, runtime)
    assert "dflash-trt serve" in str(refused.value.hint)


def test_a_schedule_is_refused(draft: Path) -> None:
    with pytest.raises(ConfigError, match="draft_schedule: expected one draft length"):
        arguments(draft, "vllm", draft_schedule={1: 7, 8: 3})


def test_gated_heads_under_vllm(tmp_path: Path) -> None:
    """vLLM 0.33's qwen3_dspark.py has no gate, and its tensors no place there."""
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", dspark="gated", sizes=SIZES)
    with pytest.raises(ConfigError, match=r"expected a vanilla Markov head, found DSpark .* is not known to serve"):
        arguments(draft, "vllm")
