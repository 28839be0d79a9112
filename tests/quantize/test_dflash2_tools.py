# SPDX-License-Identifier: Apache-2.0
"""capture, quantise, search, replay, verify and serve DFlash2 and LiLiCorr drafts; recover names what it refuses."""

import json
from pathlib import Path

import httpx2
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.errors import CheckpointError
from tests.checkpoint.dialect_samples import write_dspark
from tests.cli.commands import run_here
from tests.paths import FIXTURES
from tests.runtime.server.live import started
from tests.triton.server import Server, environment
from tests.waiting import PATIENCE

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"
LILICORR = FIXTURES / "tiny-qwen3-lilicorr"


def captured(draft: Path, file: Path) -> Path:
    asked = ("--prompts", FIXTURES / "prompts.jsonl", "--max-prompts", 4, "--max-tokens", 24)
    run_here("capture", draft, "--target", TARGET, *asked, "-o", file)
    return file


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(DRAFT, tmp_path_factory.mktemp("features") / "features.safetensors")


def test_a_correlator_reads_the_embeddings_of_all_candidates(features: Path, tmp_path: Path) -> None:
    """Another draft's file lacks them."""
    run_here("build", LILICORR, "--target", TARGET, "-o", tmp_path / "engine")
    run_here("build", DRAFT, "--target", TARGET, "-o", tmp_path / "other")
    for asked in (["engine"], ["other", "--reference", tmp_path / "engine"]):
        with pytest.raises(
            CheckpointError, match="lacks the target's embedding, which a LiLiCorr draft reads"
        ) as found:
            run_here("verify", tmp_path / asked[0], "--features", features, *asked[1:])
        assert "capture with this draft" in str(found.value.hint)


@pytest.mark.parametrize("name", ["DFlash2", "DSpark"])
def test_recover_names_it(name: str, features: Path, tmp_path: Path) -> None:
    draft = DRAFT if name == "DFlash2" else write_dspark(tmp_path / "draft")
    with pytest.raises(CheckpointError, match=f"found {name}, which `recover` does not train"):
        run_here("recover", draft, "--recipe", "nvfp4-w4a16", "--features", features, "-o", tmp_path / "out")


def test_search_without_ranges_wants_formats_of_weights(features: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="because it has block convolutions") as refused:
        run_here("search", DRAFT, "--features", features, "--max-tau-loss", "50%", "-o", tmp_path / "own.yaml")
    assert "--format W4A16_NVFP4" in str(refused.value.hint)


def test_kinds_are_compared_on_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LiLiCorr beside DFlash."""
    features = captured(LILICORR, tmp_path / "features.safetensors")
    dflash = FIXTURES / "tiny-qwen3-dflash"
    for draft in (dflash, LILICORR):
        run_here("build", draft, "--target", TARGET, "-o", tmp_path / draft.name)
    capsys.readouterr()
    asked = ("--features", features, "--reference", tmp_path / dflash.name)
    run_here("verify", tmp_path / LILICORR.name, *asked, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["engine"]["tau"] > report["reference"]["tau"] > 1.5
    assert [report[which]["kind"] for which in ("engine", "reference")] == ["LiLiCorr", "DFlash"]
    run_here("verify", tmp_path / LILICORR.name, *asked)
    said = capsys.readouterr().out
    assert "tau below DFlash's" in said
    assert "tau loss" not in said


@pytest.mark.full
@pytest.mark.parametrize("draft", [DRAFT, LILICORR], ids=lambda draft: draft.name)
def test_searched_replayed_and_verified(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = captured(draft, tmp_path / "features.safetensors")
    recipe, dense, quantised = tmp_path / "own.yaml", tmp_path / "dense", tmp_path / "quantised"
    budget = ("--max-tau-loss", "60%", "--format", "W4A16_NVFP4")
    run_here("search", draft, "--features", features, *budget, "-o", recipe)
    run_here("build", draft, "--target", TARGET, "-o", dense)
    run_here("build", draft, "--target", TARGET, "--recipe", recipe, "-o", quantised)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((FIXTURES / "prompts.jsonl").read_text().splitlines(keepends=True)[:4]))
    decoded = ("--target", TARGET, "--prompts", prompts, "--max-tokens", 24)
    taus = {}
    for name, answers in (("replayed", ("--features", features)), ("decoded", decoded)):
        capsys.readouterr()
        run_here("verify", quantised, *answers, "--reference", dense, "--json")
        report = json.loads(capsys.readouterr().out)
        taus[name] = [report[engine]["tau"] for engine in ("engine", "reference")]
    assert taus["replayed"] == taus["decoded"]
    assert min(taus["decoded"]) > 1.5


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["fp8", "int4-w4a16", "nvfp4"])
def test_quantised_and_served(recipe: str, tmp_path: Path) -> None:
    """A LiLiCorr draft answers as plain decoding does, over OpenAI's API and in a real tritonserver."""
    features, draft, engine = tmp_path / "features.safetensors", tmp_path / "draft", tmp_path / "engine"
    calibration = "none" if recipe == "int4-w4a16" else captured(LILICORR, features)
    run_here("quantize", LILICORR, "--recipe", recipe, "--calibration", calibration, "-o", draft)
    run_here("build", draft, "--target", TARGET, "-o", engine)
    prompt, num_tokens = "def isleap(year):\n", 24
    with LLM(engine, TARGET, draft_length=0) as plain:
        (expected,) = plain.generate([prompt], SamplingParams(max_tokens=num_tokens))
    with started(engine, TARGET, tmp_path / "log", "--draft-length", 7) as process:
        body = {"model": engine.name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = httpx2.post(f"{process.await_url()}/v1/completions", json=body, timeout=PATIENCE).json()
    assert answer["choices"][0]["text"] == expected.text
    run_here("triton-repo", engine, "--target", TARGET, "--runtime", "embedded", "-o", tmp_path / "models")
    server = Server(environment(), tmp_path / "models", tmp_path / "triton.log")
    try:
        server.await_ready()
        figures = {"sampling_param_return_perf_metrics": True}
        answer = server.generate({"text_input": prompt, "sampling_param_max_tokens": num_tokens, **figures})
    finally:
        server.stop()
    assert answer["text_output"] == expected.text
    assert answer["total_accepted_draft_tokens"] > 0
