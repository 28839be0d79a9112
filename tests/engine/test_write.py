# SPDX-License-Identifier: Apache-2.0
"""`build`: the same input gives the same bytes, and nothing but an engine is replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.cli import cli
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import BuildError, CheckpointError
from tests.checkpoint.samples import edit_tensors, refusal, shard, write_target

FILES = ["config.json", "context.onnx", "draft.onnx", "manifest.json", "model.safetensors"]


def build(draft: Path | str, target: Path | str, output: Path | str, *options: str) -> None:
    """`dflash-trt build`, in this process; errors come out as they are."""
    cli.main(["build", str(draft), "--target", str(target), "-o", str(output), *options], standalone_mode=False)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_directory(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    build(draft_dir, target_dir, tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == FILES
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    manifest = read_manifest(tmp_path / "out")
    assert manifest.draft == read_draft(draft_dir).spec == read_draft(tmp_path / "out").spec
    written, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(draft_dir / "model.safetensors")
    assert written.keys() == source.keys()
    assert all(written[name].equal(source[name]) for name in source)
    assert sorted(manifest.sha256) == [name for name in FILES if name != "manifest.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert read_draft(tmp_path / "out").config.values() == json.loads((draft_dir / "config.json").read_bytes())
    pool = [config[key] for key in ("use_sliding_window", "sliding_window", "layer_types", "torch_dtype")]
    assert pool == [False, None, ["full_attention"] * manifest.draft.num_layers, "bfloat16"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["draft", "out", "target"]


def test_same_bytes_in_another_process_and_directory(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """Another path, working directory and hash seed: of the machine only the target gets in, as it was named."""
    build(draft_dir, target_dir, tmp_path / "out1")
    command = [sys.executable, "-m", "dflash_trt", "build", ".", "--target", str(target_dir)]
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    output = ["-o", str(tmp_path / "out2")]
    subprocess.run([*command, *output], cwd=draft_dir, env=environment, check=True, capture_output=True)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    assert contents(tmp_path / "out1")["manifest.json"].count(str(tmp_path).encode()) == 1


def test_shards_give_the_same_engine(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    build(draft_dir, target_dir, tmp_path / "single")
    build(shard(draft_dir, num_shards=3), target_dir, tmp_path / "sharded")
    single, sharded = contents(tmp_path / "single"), contents(tmp_path / "sharded")
    manifests = [json.loads(files.pop("manifest.json")) for files in (single, sharded)]
    assert single == sharded
    sources = [manifest.pop("source")["sha256"] for manifest in manifests]
    assert manifests[0] == manifests[1]
    assert sorted(sources[0]) == ["config.json", "model.safetensors"]
    assert len(sources[1]) == 4
    build(draft_dir, target_dir, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "sharded")


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_only_engines_are_replaced(options: tuple[str, ...], draft_dir: Path, target_dir: Path) -> None:
    before = contents(target_dir)
    message = refusal(lambda: build(draft_dir, target_dir, target_dir, *options), BuildError)
    assert f"{target_dir} already exists and is not an engine directory" in message
    assert contents(target_dir) == before


def test_a_manifest_of_something_else_is_no_engine(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """Web pages and browser extensions have a file of that name."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "my page", "manifest_version": 3}')
    message = refusal(lambda: build(draft_dir, target_dir, tmp_path / "page", "--force"), BuildError)
    assert "already exists and is not an engine directory" in message
    assert list(contents(tmp_path / "page")) == ["manifest.json"]


def test_an_engine_can_be_built_from_itself(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    build(draft_dir, target_dir, tmp_path / "draft" / "out")
    before = contents(tmp_path / "draft" / "out")
    build(tmp_path / "draft" / "out", target_dir, tmp_path / "draft" / "out", "--force")
    assert contents(tmp_path / "draft" / "out").keys() == before.keys()


def test_nothing_is_written_for_a_pair_that_does_not_fit(draft_dir: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "other", hidden_size=64)
    assert "hidden_size: expected 64" in refusal(lambda: build(draft_dir, target, tmp_path / "out"), CheckpointError)
    edit_tensors(draft_dir, lambda tensors: tensors.pop("fc.weight"))
    assert "'fc.weight'" in refusal(lambda: build(draft_dir, target, tmp_path / "out"), CheckpointError)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["draft", "other"]
