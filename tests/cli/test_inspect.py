# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt inspect`: what a directory is, as one JSON document or as a table."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from tests.checkpoint.samples import edit_config, refusal, write_target
from tests.cli.commands import run, run_here
from tests.paths import FIXTURES


def as_json(facts: object) -> object:
    return json.loads(msgspec.json.encode(facts))


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    run_here("inspect", *arguments, "--json")
    captured = capsys.readouterr()
    assert captured.err == ""
    parsed: dict[str, Any] = json.loads(captured.out)  # one document, or this fails
    assert next(iter(parsed)) == "schema"
    assert parsed["schema"] == "dflash-trt/inspect/1"
    return parsed


def test_draft(draft_dir: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, draft_dir)
    assert found["kind"] == "draft"
    assert found["path"] == str(draft_dir)
    assert found["facts"] == as_json(read_draft(draft_dir).spec)
    assert found["tensors"]["count"] == 48
    assert found["tensors"]["dtypes"] == {"BF16": 48}
    assert found["tensors"]["bytes"] == sum(t.num_bytes for t in read_draft(draft_dir).weights.values())
    assert found["context_bytes_per_token"] == 384
    assert "target" not in found
    assert document(capsys, draft_dir, "--target", target_dir)["target"] == as_json(read_target(target_dir).spec)


def test_target(target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, target_dir)
    assert found["kind"] == "target"
    assert found["facts"] == as_json(read_target(target_dir).spec)
    assert found["tensors"] == {"count": 1, "bytes": 96 * 48 * 4, "dtypes": {"F32": 1}}
    assert document(capsys, edit_config(target_dir, "architectures"))["kind"] == "target"


def test_engine(draft_dir: Path, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("build", draft_dir, "--target", target_dir, "-o", tmp_path / "engine")
    found = document(capsys, tmp_path / "engine", "--target", target_dir)
    assert found["kind"] == "engine"
    assert found["facts"] == as_json(read_manifest(tmp_path / "engine"))
    assert found["tensors"]["count"] == 48
    assert found["target"]["model_type"] == "gpt_oss"
    run_here("inspect", tmp_path / "engine")
    summary = capsys.readouterr().out.splitlines()[:3]
    assert summary[0].startswith(f"draft, unquantised, for {target_dir}: ")
    assert summary[1] == "plans: none; it runs with ONNX Runtime"
    assert summary[2].startswith(f"next: dflash-trt verify {tmp_path / 'engine'} ")


def test_an_engine_that_ranks_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is that of one GPU."""
    draft, target, engine = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss", tmp_path / "engine"
    run_here("build", draft, "--target", target, "-o", engine, "--tp", 2)
    shared = document(capsys, engine)
    assert shared["facts"]["num_ranks"] == 2
    run_here("build", draft, "--target", target, "-o", engine, "--force")
    whole = document(capsys, engine)
    caches = [found["tensorrt_memory"]["cache_bytes"] for found in (whole, shared)]
    assert caches[0] == 2 * caches[1]


def test_changed_engine(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    run_here("build", draft_dir, "--target", target_dir, "-o", tmp_path / "engine")
    (tmp_path / "engine" / "draft.onnx").write_bytes(b"")
    result = run("inspect", tmp_path / "engine", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["schema"] == "dflash-trt/error/1"
    assert f"error: {tmp_path / 'engine' / 'draft.onnx'}: expected sha256" in result.stderr
    assert "\n\nhint: dflash-trt build DRAFT --target TARGET -o DIR\n" in result.stderr


def test_table(draft_dir: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("inspect", draft_dir, "--target", target_dir)
    output = capsys.readouterr().out
    assert output.startswith("draft draft")
    for row in ("layers[0].causal", "rope.scaling.factor", "target.vocab_size", "target_layer_ids"):
        assert row in output
    assert "1, 2, 3" in output
    num_bytes = sum(tensor.num_bytes for tensor in read_draft(draft_dir).weights.values())
    assert f"{num_bytes} ({num_bytes / 1024:.1f} KiB)" in output


@pytest.mark.parametrize("name", ["[/b]", "[red]x", "x\udcff"])
def test_table_of_a_strange_directory(
    name: str, draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are markup to rich, and a file name need not be Unicode."""
    (tmp_path / "strange").mkdir()
    directory = draft_dir.rename(tmp_path / "strange" / name.replace("/", "."))
    run_here("inspect", directory)
    assert capsys.readouterr().out.startswith(f"draft {name.replace('/', '.').replace(chr(0xDCFF), '�')}")
    assert document(capsys, directory)["kind"] == "draft"


def test_swapped_target(draft_dir: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "other", vocab_size=100)
    message = refusal(lambda: run_here("inspect", draft_dir, "--target", target))
    assert f"{draft_dir} does not fit target {target}: vocab_size: expected 100 (target), found 96 (draft)" in message


def test_target_of_a_target(target_dir: Path) -> None:
    with pytest.raises(click.UsageError, match="--target is for a draft or an engine"):
        run_here("inspect", target_dir, "--target", target_dir)


def test_a_licence_that_forbids_commercial_use_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalogue knows it by repository; a directory has none."""
    directory = FIXTURES / "tiny-qwen3-dflash2"
    monkeypatch.setattr(import_module("dflash_trt.cli.inspect"), "configuration_directory", lambda _: directory)
    assert "licence" not in document(capsys, directory)
    run_here("inspect", "incoai/GLM-5.3-Flash-DFlash2", "--json")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["licence"] == "CC BY-NC-ND 4.0"
    assert "its licence, CC BY-NC-ND 4.0, forbids commercial use" in captured.err
