# SPDX-License-Identifier: Apache-2.0
"""The target that a draft was trained for is named if it is known; equal shapes alone are not called a fit."""

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.deploy.trained_target import TrainedTarget, pair_warnings, shapes_fit, trained_target
from tests.checkpoint.dialect_samples import write_speculators
from tests.checkpoint.samples import edit_config, write_target
from tests.cli.commands import run

Z_LAB = "z-lab/gpt-oss-120b-DFlash"


def warnings(trained: TrainedTarget | None, name: str, draft_dir: Path, target_dir: Path) -> list[str]:
    return list(pair_warnings("D", read_draft(draft_dir).spec, trained, name, read_target(target_dir)))


@pytest.mark.parametrize(
    ("target", "is_another"),
    [
        ("openai/gpt-oss-120b", False), ("nvidia/gpt-oss-120b-NVFP4", False), ("nvidia/gpt-oss-120b-Eagle3", True),
        ("Qwen/Qwen3-8B", True), ("openai/gpt-oss-20b", True), ("tests", False),
    ],
)  # fmt: skip
def test_a_draft_of_the_catalogue(target: str, is_another: bool, draft_dir: Path, target_dir: Path) -> None:
    """A quantised copy has a name of its own; of a directory nothing is known."""
    trained = trained_target(Z_LAB, None)
    assert trained is not None
    words = [f"D was trained for openai/gpt-oss-120b, not for {target}"] if is_another else []
    assert warnings(trained, target, draft_dir, target_dir) == words
    assert shapes_fit("D", target, trained).endswith("; trained for: openai/gpt-oss-120b (catalogue)")


def test_an_unknown_draft(draft_dir: Path, target_dir: Path) -> None:
    assert trained_target("owner/draft", read_draft(draft_dir).config) is None
    assert warnings(None, "owner/target", draft_dir, target_dir) == []
    assert shapes_fit("D", "T", None) == "D: shapes fit target T; trained for: not known"


def test_the_verifier_of_a_speculators_file(tmp_path: Path, target_dir: Path) -> None:
    """Architectures are compared for a directory, too, whose name says nothing."""
    directory = write_speculators(tmp_path / "speculators")
    edit_config(target_dir, max_position_embeddings=4096)
    trained = trained_target("D", read_draft(directory).config)
    expected = TrainedTarget(
        name="Qwen/Qwen3-8B", source="speculators_config.verifier", architectures=("Qwen3ForCausalLM",)
    )
    assert trained == expected
    words = [f"D was trained for Qwen/Qwen3-8B, not for {target_dir}"]
    assert warnings(trained, str(target_dir), directory, target_dir) == words
    edit_config(target_dir, architectures=["Qwen3ForCausalLM"])
    assert warnings(trained, str(target_dir), directory, target_dir) == []
    assert warnings(trained, "Qwen/Qwen3-4B", directory, target_dir) == [
        "D was trained for Qwen/Qwen3-8B, not for Qwen/Qwen3-4B"
    ]


@pytest.mark.parametrize("verifier", [None, {}, {"name_or_path": 3}, {"name_or_path": ""}, "text", ["x"]])
def test_a_verifier_that_names_nothing(verifier: Any, tmp_path: Path) -> None:
    directory = edit_config(write_speculators(tmp_path / "draft"), speculators_config={"verifier": verifier})
    assert trained_target("D", read_draft(directory).config) is None


def test_fewer_positions_than_the_target(draft_dir: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "long", max_position_embeddings=9000)
    words = "D has positions for 8192 tokens (max_position_embeddings), its target for 9000: beyond 8192 tokens"
    (warning,) = warnings(None, "T", draft_dir, target)
    assert warning.startswith(words)
    shown = run("inspect", draft_dir, "--target", target)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (
        0, f"{draft_dir}: shapes fit target {target}; trained for: not known",
    )  # fmt: skip
    for command in (("inspect", draft_dir), ("build", draft_dir, "-o", tmp_path / "engine")):
        assert "has positions for 8192 tokens" in run(*command, "--target", target).stderr
