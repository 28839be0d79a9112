# SPDX-License-Identifier: Apache-2.0
"""Engines of drafts that others packed: the bytes, and the tau, of the dense draft with the same weights."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_trt.engine.manifest import read_manifest
from tests.checkpoint.compressed_samples import write_packed
from tests.checkpoint.gguf_samples import Type, write_gguf
from tests.checkpoint.samples import edit_tensors
from tests.cli.commands import run
from tests.paths import FIXTURES

TARGET = FIXTURES / "tiny-qwen3"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained draft as W4A16 and as GGUF, and both converted."""
    path = tmp_path_factory.mktemp("packed")
    draft = FIXTURES / "tiny-qwen3-dflash"
    write_gguf(draft, path / "gguf.gguf", Type.Q8_0)
    write_packed(Path(shutil.copytree(draft, path / "w4a16")), group=32)
    for source, name in (("w4a16", "w4a16"), ("gguf.gguf", "gguf")):
        shown = run("convert", path / source, "-o", path / f"{name}-bf16", "--to", "zlab")
        assert shown.returncode == 0, shown.stderr
    return path


def build(place: Path, draft: str, engine: str, *options: str) -> str:
    shown = run("build", place / draft, "--target", TARGET, "-o", place / engine, *options)
    assert shown.returncode == 0, shown.stderr
    return shown.stderr


def graphs(engine: Path) -> dict[str, bytes]:
    """All files but the manifest and config.json, whose source and whose order of keys are the draft's."""
    names = {"manifest.json", "config.json", "hf_quant_config.json"}
    return {file.name: file.read_bytes() for file in engine.iterdir() if file.name not in names}


SLOW = [pytest.param("w4a16", None, marks=pytest.mark.full), pytest.param("gguf.gguf", "fp8", marks=pytest.mark.full)]


@pytest.mark.parametrize(("draft", "recipe"), [("w4a16", "nvfp4"), *SLOW])
def test_built_as_the_dense_draft(draft: str, recipe: str | None, place: Path) -> None:
    name = draft.partition(".")[0]
    options = () if recipe is None else ("--recipe", recipe)
    said = build(place, draft, f"{name}-{recipe}", *options)
    words = "GGUF: " if name == "gguf" else "compressed-tensors pack-quantized (int4, groups of 32, symmetric)"
    assert f"{draft}: {words}" in said
    assert "read as BF16" not in build(place, f"{name}-bf16", f"{name}-bf16-{recipe}", *options)
    packed, dense = place / f"{name}-{recipe}", place / f"{name}-bf16-{recipe}"
    assert graphs(packed) == graphs(dense)
    assert read_manifest(packed).draft == read_manifest(dense).draft


@pytest.mark.full
def test_decodes_with_the_tau_of_the_dense_weights(place: Path) -> None:
    """A draft of other weights does not: rows shifted by one are noticed."""
    shifted = Path(shutil.copytree(place / "w4a16", place / "shifted"))
    edit_tensors(
        shifted, lambda tensors: tensors.update({n: t.roll(1, 0) for n, t in tensors.items() if n.endswith("_packed")})
    )
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()[:6]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    tau = {}
    for draft in ("w4a16", "w4a16-bf16", "gguf.gguf", "gguf-bf16", "shifted"):
        build(place, draft, f"tau-{draft}")
        prompts = ("--prompts", place / "prompts.jsonl", "--max-tokens", 32)
        shown = run("verify", place / f"tau-{draft}", "--target", TARGET, *prompts, "--json")
        tau[draft] = json.loads(shown.stdout)["engine"]["tau"]
    assert tau["w4a16"] == tau["w4a16-bf16"] > 2
    assert tau["gguf.gguf"] == tau["gguf-bf16"] > 2
    assert tau["shifted"] < 1.5
