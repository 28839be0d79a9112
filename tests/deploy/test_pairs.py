# SPDX-License-Identifier: Apache-2.0
"""Drafts that do not fit the target, or whose layout the runtime does not read: refused by writer and checker alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.published import published_drafts, published_targets
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import ResolvedDeployment, draft_deployment, resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.sizes import target_sizes
from dflash_trt.errors import CheckpointError
from tests.checkpoint.samples import edit_config
from tests.cli.commands import run, run_here
from tests.deploy.deployments import RUNTIMES
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


def deployed(draft: Path, target: object = TARGET) -> ResolvedDeployment:
    return resolve(draft_deployment(str(draft), target=str(target), gpus="b200x1"), "x")


def written(draft: Path, runtime: Runtime) -> list[Finding]:
    """Errors about what serve-config writes."""
    deployment = deployed(draft)
    arguments = render(deployment, runtime, "dflash", host="127.0.0.1", port=8000).arguments
    found = check(deployment_config(deployment, load_schema(runtime), arguments))
    return [finding for finding in found if finding.severity == ERROR]


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
    assert whole is not None
    assert alone is not None
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
