# SPDX-License-Identifier: Apache-2.0
"""`LLM` of a draft checkpoint: its engine is built once, in the user's cache, complete or not at all."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.engine import engine_directory
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import BuildError, CheckpointError, EngineError
from dflash_trt.llm import LLM
from dflash_trt.runtime.cached_engine import built_engine, cache_directory, is_checkpoint
from tests.checkpoint.samples import COMMIT, edit_config
from tests.engines import trained_engine
from tests.llm.serving import PROMPTS, greedy
from tests.paths import FIXTURES, REPOSITORY
from tests.waiting import PATIENCE

TARGET, DRAFT = str(FIXTURES / "tiny-qwen3"), str(FIXTURES / "tiny-qwen3-dflash")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash-trt" / "engines"


def engines(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_a_draft_opens_like_its_engine(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(trained_engine("tiny-qwen3"), TARGET, max_batch_size=1) as llm:
        expected = llm.generate(PROMPTS[0], greedy(12))[0].token_ids
    capsys.readouterr()
    said = []
    for _ in range(2):
        with LLM(DRAFT, TARGET, max_batch_size=1) as llm:
            assert llm.generate(PROMPTS[0], greedy(12))[0].token_ids == expected
        said.append(capsys.readouterr().err)
    (name,) = engines(cache)
    assert f"building the engine of {DRAFT} for {TARGET} in {cache / name}\n" in said[0]
    assert "building" not in said[1]
    assert read_manifest(cache / name).source.sha256.keys() == {"config.json", "model.safetensors"}


def test_other_files_are_another_engine(cache: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    first, _ = built_engine(str(draft), TARGET)
    edit_config(draft, rms_norm_eps=1e-5)
    second, _ = built_engine(str(draft), TARGET)
    assert sorted(engines(cache)) == sorted([first.name, second.name])
    assert built_engine(str(draft), TARGET) == (second, TARGET)


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_directory, "_write_graphs", stop)
        with pytest.raises(KeyboardInterrupt):
            built_engine(DRAFT, TARGET)
    assert engines(cache) == []
    assert read_manifest(built_engine(DRAFT, TARGET)[0])


def test_builders_at_once_wait_for_each_other(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(built_engine(DRAFT, TARGET)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [cache / engines(cache)[0]] * 4
    assert capsys.readouterr().err.count("building") == 1


def test_what_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is a checkpoint, not an engine directory, and its target is not known"):
        LLM(DRAFT)
    with pytest.raises(CheckpointError, match="swapped"):
        LLM(TARGET, DRAFT)
    with pytest.raises(EngineError, match="is not an engine directory: found the id of a Hugging Face repository"):
        LLM("someone/unknown-dflash")
    with pytest.raises(EngineError, match="is not an engine directory: found nothing there"):
        LLM(tmp_path / "no/such/engine")
    shutil.copytree(trained_engine("tiny-qwen3"), tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_text("{}")
    with pytest.raises(EngineError, match=r"manifest\.json"):
        LLM(tmp_path / "damaged", TARGET)
    assert not is_checkpoint(str(trained_engine("tiny-qwen3")), TARGET)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write .*: Not a directory") as refused:
        built_engine(DRAFT, TARGET)
    assert str(refused.value.hint).startswith("set XDG_CACHE_HOME to another directory")


def test_a_relative_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_directory() == tmp_path / ".cache" / "dflash-trt" / "engines"


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """An environment whose hub's cache has two repositories of the catalogue, with the fixtures' files; offline."""
    for name, directory in (("z-lab/Qwen3-8B-DFlash-b16", DRAFT), ("Qwen/Qwen3-8B", TARGET)):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(directory, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    return os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.full
def test_a_known_repository_brings_its_partner(cache: Path, hub: dict[str, str]) -> None:
    script = (
        "from dflash_trt import LLM, SamplingParams\n"
        "for name in ('z-lab/Qwen3-8B-DFlash-b16', 'Qwen/Qwen3-8B'):\n"
        "    with LLM(name, max_batch_size=1) as llm:\n"
        "        print(llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=hub, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert first == second
    assert len(first) == 4
    assert result.stderr.count("building the engine of z-lab/Qwen3-8B-DFlash-b16 for Qwen/Qwen3-8B") == 1
    assert engines(cache)[0].startswith("z-lab--Qwen3-8B-DFlash-b16-")


@pytest.mark.full
@pytest.mark.parametrize("words", [["Qwen/Qwen3-8B"], [TARGET, "--draft", DRAFT]], ids=["id", "directories"])
def test_a_target_is_served_by_its_name(words: list[str], cache: Path, hub: dict[str, str]) -> None:
    """The engine is built in the cache, which is said, and the model has the target's name."""
    command = [sys.executable, "-m", "dflash_trt", "serve", *words, "--port", "0"]
    with subprocess.Popen(command, env=hub, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said: list[str] = []
        for line in server.stderr:
            said.append(line)
            if line.startswith("serving "):
                break
        server.terminate()
    assert f"serving {words[0] if len(words) == 1 else 'tiny-qwen3'} on http://127.0.0.1:" in said[-1]
    assert f"engine: {cache / engines(cache)[0]}\n" in said
    is_published = len(words) == 1
    assert any("was trained on answers without thinking" in line for line in said) == is_published
