# SPDX-License-Identifier: Apache-2.0
"""Drafts as training wrappers save them are read, and remains of downloads are named."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.errors import UnreachableError
from tests.checkpoint.dialect_samples import add_random
from tests.checkpoint.samples import cache_repository, edit_tensors, refusal
from tests.cli.commands import run
from tests.paths import FIXTURES

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2103451648\n"
PAGE = "<!DOCTYPE html><html><body>Sign in</body></html>"


def prefixed(directory: Path, prefix: str) -> Path:
    file = directory / "model.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}, file)
    return directory


@pytest.mark.parametrize(
    "prefix", ["model.", "module.", "_orig_mod.", "draft_model.", "module._orig_mod.", "module.model."]
)
def test_a_prefix_of_all_names(prefix: str, draft_dir: Path) -> None:
    expected = read_draft(draft_dir)
    draft = read_draft(prefixed(draft_dir, prefix))
    assert (draft.spec, draft.prefix, expected.prefix) == (expected.spec, prefix, "")
    assert draft.weights.keys() == expected.weights.keys()
    assert all(name == tensor.name for name, tensor in draft.weights.items())
    assert "tensor_prefix" in run("inspect", draft_dir).stdout


def test_a_prefix_beside_the_head(draft_dir: Path) -> None:
    """transformers saves lm_head beside `model.`."""
    add_random(draft_dir, {"lm_head.weight": (96, 48)})
    expected = read_draft(draft_dir)
    edit_tensors(
        draft_dir,
        lambda tensors: tensors.update({f"model.{n}": tensors.pop(n) for n in [*tensors] if n != "lm_head.weight"}),
    )
    assert read_draft(draft_dir).spec == expected.spec


def test_other_prefixes_stay(draft_dir: Path) -> None:
    assert "missing tensor 'fc.weight'" in refusal(lambda: read_draft(prefixed(draft_dir, "student.")))


def test_an_engine_of_a_prefixed_draft(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (FIXTURES / "tiny-qwen3-dflash").iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    prefixed(draft, "module.")
    for source, name in ((FIXTURES / "tiny-qwen3-dflash", "plain"), (draft, "prefixed")):
        built = run("build", source, "--target", FIXTURES / "tiny-qwen3", "-o", tmp_path / name)
        assert built.returncode == 0, built.stderr
    for file in ("context.onnx", "draft.onnx", "model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "prefixed" / file).read_bytes()


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"])
def test_caches_of_rotary_embeddings_are_skipped(name: str, draft_dir: Path) -> None:
    expected = read_draft(draft_dir)
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert read_draft(draft_dir).weights.keys() == expected.weights.keys()


def test_a_draft_that_was_saved_as_a_plain_model(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: [tensors.pop(name) for name in ("fc.weight", "hidden_norm.weight")])
    add_random(draft_dir, {"embed_tokens.weight": (96, 48), "lm_head.weight": (96, 48)})
    message = refusal(lambda: read_draft(draft_dir))
    assert "has layers and an embedding, but neither fc nor hidden_norm: it was saved as the plain model" in message
    assert "llm-compressor's oneshot" in message


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model.safetensors.index.json", "draft.gguf"])
@pytest.mark.parametrize(
    ("content", "words"),
    [(POINTER, "is a pointer of Git LFS, not"), (PAGE, "is a web page, not"), (f"\n{PAGE}", "web page")],
)
def test_what_stands_in_the_place_of_a_file(content: str, words: str, file: str, draft_dir: Path) -> None:
    if file.startswith("model"):
        (draft_dir / "model.safetensors").unlink()
    (draft_dir / file).write_text(content)
    message = refusal(lambda: read_draft(draft_dir / file if file.endswith("gguf") else draft_dir))
    assert words in message
    assert ("git lfs pull" if content == POINTER else "download the file again") in message


def test_a_download_that_was_not_finished(draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").rename(draft_dir / "model.safetensors.incomplete")
    assert "model.safetensors.incomplete is a download that was not finished" in refusal(lambda: read_draft(draft_dir))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_folders_of_the_cache(cache: Path, draft_dir: Path) -> None:
    snapshot = cache_repository(cache, "owner/name", draft_dir)
    message = refusal(lambda: checkpoint_directory(str(snapshot.parents[1])))
    assert "found a repository of the Hugging Face cache" in message
    assert f"give its snapshot {snapshot}" in message
    message = refusal(lambda: checkpoint_directory(str(cache)))
    assert "found the Hugging Face cache itself" in message
    assert "give the id of a repository, as owner/name" in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"no commit", b"../../../etc", b"a\x00b", b"x" * 300])
def test_refs_that_name_no_commit(content: bytes, cache: Path, draft_dir: Path) -> None:
    snapshot = cache_repository(cache, "owner/name", draft_dir)
    (snapshot.parents[1] / "refs" / "main").write_bytes(content)
    assert "hint: " in refusal(lambda: read_draft(checkpoint_directory("owner/name")))


def test_an_incomplete_snapshot_offline(cache: Path, draft_dir: Path) -> None:
    """The hub knows files that nothing needs: the draft is read; without weights the error names what is missing."""
    snapshot = cache_repository(cache, "owner/name", draft_dir)
    trees = snapshot.parents[1] / "trees"
    trees.mkdir()
    names = [*(file.name for file in draft_dir.iterdir()), "generation_config.json"]
    files = {name: {"size": 1, "blob_id": "0"} for name in names}
    (trees / f"{snapshot.name}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert read_draft(checkpoint_directory("owner/name")).spec == read_draft(draft_dir).spec
    (snapshot / "model.safetensors").unlink()
    message = refusal(lambda: checkpoint_directory("owner/name"), UnreachableError)
    assert "owner/name: no weights (model.safetensors) in the Hugging Face cache" in message
