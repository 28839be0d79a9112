# SPDX-License-Identifier: Apache-2.0
"""Drafts that do not fit the target, or whose layout or method a runtime does not read; DSpark in each one's words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.published import published_drafts, published_targets
from dflash_trt.deploy.resolve import draft_deployment, resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.sizes import target_sizes
from dflash_trt.errors import CheckpointError, ConfigError
from tests.checkpoint.samples import edit_config
from tests.cli.commands import run, run_here
from tests.deploy.deployments import RUNTIMES, config_of
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


def deployed(draft: Path, target: object = TARGET) -> ResolvedDeployment:
    return resolve(draft_deployment(str(draft), target=str(target), gpus="b200x1"), "x")


def written(draft: Path, runtime: Runtime) -> list[Finding]:
    """Errors about what serve-config writes."""
    return [finding for finding in check(config_of(deployed(draft), runtime)) if finding.severity == ERROR]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_published_facts_of_a_target_are_compared(runtime: Runtime, tmp_path: Path) -> None:
    """By the check that `build` makes."""
    words = "does not fit target Qwen/Qwen3-8B: hidden_size: expected 4096 (target), found 128 (draft)"
    pair = ("--target", "Qwen/Qwen3-8B", "--gpus", "h100x1", "--runtime", runtime)
    assert words in run("serve-config", DRAFT, *pair).stderr
    file = tmp_path / "config"
    file.write_text(run("serve-config", DRAFT, *pair[2:], "--target", TARGET).stdout)
    checked = run("serve-config", "--check", file, *pair)
    assert checked.returncode == 1
    assert words in checked.stdout
    assert "[pair]" in checked.stdout


def test_a_file_of_other_models_is_not_checked_for_these(tmp_path: Path) -> None:
    """Advice for another draft and target would be wrong; a quantised copy of the target is none."""
    file = tmp_path / "serve.sh"
    spec = "--speculative-config.method dflash --speculative-config.num_speculative_tokens 9"
    names = ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash")
    for target, draft, wrong in (
        (*names, 0),
        ("me/gpt-oss-120b-FP8", names[1], 0),
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 2),
    ):
        file.write_text(f"vllm serve {target} --speculative-config.model {draft} {spec}\n")
        found = run("serve-config", "gpt-oss-120b.h200x8.latency", "--check", file, "--runtime", "vllm")
        assert found.stdout.count("[other-models]") == wrong
        assert found.returncode == bool(wrong)


def test_published_drafts_fit_their_targets() -> None:
    assert published_drafts()
    assert {draft.target for draft in published_drafts().values()} <= published_targets().keys()


def test_a_config_json_alone_is_compared(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    shutil.copy(TARGET / "config.json", target)
    whole, alone = target_sizes(str(TARGET)), target_sizes(str(target))
    assert (alone.spec, alone.cache, alone.num_attention_heads) == (whole.spec, whole.cache, whole.num_attention_heads)
    assert alone.weight_bytes(1) == pytest.approx(whole.weight_bytes(1), rel=0.2)
    assert deployed(DRAFT, target).max_seq_len == deployed(DRAFT).max_seq_len
    edit_config(target, hidden_size=256)
    with pytest.raises(CheckpointError, match=r"does not fit target .*expected 256"):
        deployed(DRAFT, target)


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    run_here("convert", DRAFT, "-o", tmp_path / "draft", "--to", "speculators", "--target", TARGET)
    return tmp_path / "draft"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_named_command_makes_a_draft_that_is_served(runtime: Runtime, speculators: Path) -> None:
    errors = written(speculators, runtime)
    if runtime == "vllm":
        assert errors == []
        return
    (found,) = errors
    assert found.rule == "draft-layout"
    command, _, place = found.fix.partition(", and serve ")
    run_here(*command.split()[1:])
    assert written(Path(place), runtime) == []
    assert read_draft(Path(place)).spec == read_draft(DRAFT).spec


def test_no_command_is_named_that_would_be_refused(speculators: Path) -> None:
    """An embedding of the draft's own has no place in z-lab's layout."""
    tensors = load_file(speculators / "model.safetensors")
    spec = read_draft(speculators).spec
    tensors["embed_tokens.weight"] = torch.zeros(spec.vocab_size or 0, spec.hidden_size, dtype=torch.bfloat16)
    save_file(tensors, speculators / "model.safetensors")
    (found,) = written(speculators, "sglang")
    assert found.fix.startswith("serve it with vLLM: convert --to zlab refuses it (own_embedding: expected False")
    with pytest.raises(CheckpointError, match="own_embedding: expected False"):
        run_here("convert", speculators, "-o", speculators.parent / "copy", "--to", "zlab")
    assert written(speculators, "vllm") == []


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
    """Output of serve-config, without an error by the release's schema and the rules."""
    file = draft_deployment(str(draft), target=str(FIXTURES / "tiny-qwen3"), gpus="b200x1")
    config = config_of(resolve(msgspec.structs.replace(file, **facts), "x"), runtime)
    assert [finding for finding in check(config) if finding.severity == ERROR] == []
    return config.document


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
