# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt inspect`: what a directory is, as JSON or a table; and that every command parses a file once."""

import json
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from huggingface_hub import constants

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.deploy.catalog import catalog
from dflash_trt.engine.manifest import read_manifest
from tests.checkpoint.dialect_samples import FULL, write_speculators
from tests.checkpoint.samples import edit_config
from tests.cli.commands import run, run_here
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each text was parsed as JSON, by whichever of our two parsers."""
    counts: Counter[bytes] = Counter()

    def counting(parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(content: bytes | str, *arguments: Any, **options: Any) -> Any:
            counts[content.encode() if isinstance(content, str) else bytes(content)] += 1
            return parse(content, *arguments, **options)

        return counted

    monkeypatch.setattr(json, "loads", counting(json.loads))
    monkeypatch.setattr(msgspec.json, "decode", counting(msgspec.json.decode))
    return counts


def texts(directory: Path) -> dict[str, bytes]:
    """JSON files of a checkpoint that we read."""
    names = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
    found = {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    for file in directory.glob("*.safetensors"):
        content = file.read_bytes()
        found[file.name] = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return found


def deployment(file: Path, recipe: str) -> Path:
    file.write_text(
        f"description: a fixture\ntarget: {TARGET}\ndraft: {DRAFT}\ngpus: h100x1\npurpose: latency\nrecipe: {recipe}\n"
    )
    return file


def reads(parsed: Counter[bytes], directory: Path) -> dict[str, int]:
    return {name: parsed[text] for name, text in texts(directory).items()}


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", DRAFT, "--target", TARGET), ("build", "CONFIG", "-o", "OUTPUT"), ("build", "NVFP4", "-o", "OUTPUT"),
        ("build", DRAFT, "--target", TARGET, "-o", "OUTPUT", "--recipe", "nvfp4"), ("build", "CONFIG", "--dry-run"),
        ("quantize", DRAFT, "--target", TARGET, "-o", "OUTPUT", "--recipe", "fp8"),
        ("serve-config", "CONFIG", "--runtime", "trtllm"), ("triton-repo", "CONFIG", "-o", "OUTPUT"),
    ],
    ids=lambda words: " ".join(str(getattr(word, "name", word)) for word in words[:2]),
)  # fmt: skip
def test_a_pair_is_read_once(words: tuple[object, ...], parsed: Counter[bytes], tmp_path: Path) -> None:
    places: dict[object, object] = {
        "OUTPUT": tmp_path / "output",
        "CONFIG": deployment(tmp_path / "bf16.yaml", "bf16"),
        "NVFP4": deployment(tmp_path / "nvfp4.yaml", "nvfp4"),
    }
    run_here(*(places.get(word, word) for word in words))
    assert reads(parsed, DRAFT) == {"config.json": 1, "model.safetensors": 1}
    assert reads(parsed, TARGET) == {"config.json": 1, "model.safetensors": 1}


def test_a_quantised_draft_is_read_once(parsed: Counter[bytes], tmp_path: Path) -> None:
    run_here("quantize", DRAFT, "-o", tmp_path / "draft", "--recipe", "nvfp4")
    parsed.clear()
    run_here("build", tmp_path / "draft", "--target", TARGET, "-o", tmp_path / "engine")
    assert reads(parsed, tmp_path / "draft") == {"config.json": 1, "hf_quant_config.json": 1, "model.safetensors": 1}


def test_a_target_is_read_once(parsed: Counter[bytes]) -> None:
    run_here("inspect", TARGET)
    assert reads(parsed, TARGET) == {"config.json": 1, "model.safetensors": 1}


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
    assert (found["method"], found["num_draft_tokens"]) == ("DFlash", 5)
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


def test_what_vllm_computes_otherwise_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Speculators draft without sliding layers, and the key that makes all of them causal there."""
    draft = edit_config(write_speculators(tmp_path / "draft"), transformer_layer_config__layer_types=[FULL] * 3)
    run_here("inspect", draft)
    printed = capsys.readouterr()
    assert "warning: " in printed.err
    assert "vLLM 0.33 computes all layers causal: sliding_window_non_causal, false, holds for full" in printed.err
    run_here("inspect", edit_config(draft, sliding_window_non_causal=True))
    assert "vLLM" not in capsys.readouterr().err


def test_a_known_draft_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue's facts, with a warning; refused where a check is asked, or nothing is known."""
    known = next(draft for draft in catalog().drafts if draft.facts is not None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    shown = run("inspect", known.draft, "--json")
    document = json.loads(shown.stdout)
    assert (document["kind"], document["known_target"]) == ("catalogued draft", known.target)
    assert document["facts"] == json.loads(msgspec.json.encode(known.facts))
    assert f"{known.draft}: no files in the Hugging Face cache" in shown.stderr
    assert "nothing was checked" in shown.stderr
    for words in ([known.draft, "--target", str(TARGET)], ["someone/unknown"]):
        refused = run("inspect", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
