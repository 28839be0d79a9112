# SPDX-License-Identifier: Apache-2.0
"""Acceptance, curves, bands and memory, and `dflash-trt estimate` as people and scripts call it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dflash_trt.deploy.memory import gpu_memory, request_bytes
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate import report
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau, read_acceptance, read_routing
from dflash_trt.observe.estimate.constants import vary
from dflash_trt.observe.estimate.curve import OperatingPoint, Traffic, point, points, rate_at
from dflash_trt.observe.estimate.estimate_text import caution
from dflash_trt.observe.estimate.inputs import default_runtime, open_system
from dflash_trt.observe.estimate.report import CACHES, batch_limit, memory_items
from dflash_trt.observe.estimate.shapes import METHODS, Method
from dflash_trt.observe.estimate.step_cost import StepLoad
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS, resolved
from tests.deploy.deployments import NAMES as SHIPPED
from tests.observe.estimate.systems import B300, DENSE, ENGINE, MOE, NAMES, model_of, system_of
from tests.paths import FIXTURES, REPOSITORY

CONFIG = str(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml")


def test_json_document() -> None:
    result = run("estimate", CONFIG, "--tau", "4.7", "--replicas", 3, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["schema"], document["replicas"]) == ("dflash-trt/estimate/1", 3)
    assert [curve["method"] for curve in document["curves"]] == ["none", "eagle3", "dflash"]
    for curve in document["curves"]:
        for entry in curve["points"]:
            assert entry["user_rate"]["low"] <= entry["user_rate"]["value"] <= entry["user_rate"]["high"]
    assert [each["ranks"] for each in document["drafters"]] == [1, 8]
    dflash = document["accounts"][2]
    assert dflash["point"]["tau"] == pytest.approx(4.7)
    assert {term["part"] for term in dflash["terms"]} == {"target", "drafter", "communication", "host"}


def test_forty_lines_beside_what_is_published() -> None:
    """Within the deployment's own range, the figures of others for the same target, GPU and runtime."""
    lines = run("estimate", "gpt-oss-120b.b300x8.nvfp4").stdout.splitlines()
    assert len(lines) <= 40
    (published,) = (line for line in lines if line.startswith("published"))
    assert published == (
        "published: 2.3x to 2.6x plain decoding, EAGLE-3 1.7x (5 rows, batch not stated), TensorRT-LLM, 8 x B300:"
        " NVIDIA developer blog, 2026-06-23"
    )
    batches = [line.split("│")[1].strip() for line in lines[-8:-1]]
    assert batches == ["1", "2", "4", "8", "16", "32", "64"]
    other = run("estimate", "qwen3-8b.b200x1.latency", "--runtime", "sglang").stdout
    assert "published: 2.4x to 5.1x plain decoding (10 rows, batch 1 to 32), SGLang, B200: DFlash, arXiv" in other
    elsewhere = run("estimate", "qwen3-8b.rtx5090x1.latency").stdout
    assert "published: nothing for Qwen/Qwen3-8B with vLLM on rtx5090x1" in elsewhere


def test_tables_and_page(tmp_path: Path) -> None:
    page = tmp_path / "curve.html"
    result = run("estimate", CONFIG, "--tau", "4.7", "--all", "--html", str(page), "--routing", "uniform")
    assert result.returncode == 0, result.stderr
    assert "one step, DFlash: batch 1, 9 drafts, tau 4.70" in result.stdout
    assert "plain ends" in result.stdout
    begin = result.stdout.splitlines()[:3]
    answer = r"DFlash: one user gets [\d,]+ tokens/s .*x plain decoding .*; a GPU at most [\d,]+ tokens/s .*\d\."
    assert re.fullmatch(answer, begin[0]), "the answer stands first"
    (counts,) = re.findall(r"(\d+ of \d+) published speeds that were held out lay within 25%", begin[2])
    assert f"{counts} held out" in (REPOSITORY / "docs" / "estimate.md").read_text()
    text = page.read_text()
    assert not re.search(r"(src|srcset|href)=\"(?!data:)|<script|@import|url\(", text)  # nothing is loaded
    assert "prefers-color-scheme: dark) { img { filter: invert" in text, "the picture is dark where the page is"
    assert re.search(answer, text)
    assert text.count("data:image/svg+xml;base64,") == 2, "for wide and for narrow windows"
    assert "plain: 444.6 and 55.6 at 1" in text, "the picture in words"


def test_a_step_that_does_not_fit_says_so() -> None:
    lines = run("estimate", CONFIG, "--tau", "4.7", "--all", "--batch", 1000000).stdout
    (said,) = re.findall(r"one step, DFlash: [^┏]*", lines)
    assert "experts a layer; too large, memory allows batch 16,384 (max_num_tokens 16384" in " ".join(said.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-oss-20b.h100x1.latency", "TensorRT-LLM publishes 1.1 to 1.5 times less throughput"),
        ("qwen3.5-4b.l40sx1.latency", "1.2x plain decoding where 3.7x is predicted (vLLM #49730)"),
        ("gpt-oss-20b.b200x1.latency", ""), ("qwen3-8b.h200x1.latency", ""), ("qwen3.5-4b.h200x1.latency", ""),
    ],
)  # fmt: skip
def test_what_is_known_to_be_predicted_too_high_is_said(name: str, words: str) -> None:
    said = caution(open_system(name, default_runtime(name), None, None)[1])
    assert words in said
    assert bool(said) == bool(words)


def test_warnings_stand_before_the_tables() -> None:
    head = run("estimate", "gpt-oss-20b.h100x1.latency", "--tau", "4").stdout.partition("throughput per GPU at")[0]
    assert "Caution: for four-bit experts" in head


def test_picture_and_measured_routing(tmp_path: Path) -> None:
    picture, counts = tmp_path / "curve.png", tmp_path / "routing.json"
    counts.write_text(json.dumps([1.0] * 8 + [0.0] * 120))
    result = run("estimate", CONFIG, "--tau", "4.7", "--routing", counts, "--plot", picture, "--json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(result.stdout)["accounts"][2]["experts_touched"] == pytest.approx(8, abs=0.1)


def test_a_config_json_is_enough_of_a_target(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "tiny-gpt-oss" / "config.json", tmp_path)
    arguments = ("--target", str(tmp_path), "--draft", str(FIXTURES / "tiny-gpt-oss-dflash"))
    result = run("estimate", CONFIG, "--tau", "2", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    target = json.loads(result.stdout)["system"]["target"]
    assert (target["num_experts"], target["top_k"], target["cache"]["num_full_layers"]) == (8, 2, 2)
    other = run("estimate", CONFIG, "--tau", "2", "--target", str(tmp_path))
    assert other.returncode == 1
    assert "hidden_size: expected 128 (target), found 2880 (draft)" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--tau", "4", "--acceptance", "x.json"],
            2,
            "one of --acceptance VERIFY.json (from verify --json) and --tau X",
        ),
        (["--tau", "12"], 1, "tau: expected 1 to 10 for 9 drafts, found 12"),
        (["--tau", "4", "--routing", "skewed"], 1, "--routing: expected power-law, uniform or a JSON file"),
        (["--tau", "4", "--html", "no/such/place.html"], 2, "--html: expected a .html file in an existing directory"),
        (
            ["--tau", "4", "--prompt-tokens", "32768", "--output-tokens", "1"],
            1,
            "max_seq_len 32768 tokens, found 32768 + 1",
        ),
    ],
)
def test_refusals(arguments: list[str], code: int, words: str) -> None:
    result = run("estimate", CONFIG, *arguments)
    assert result.returncode == code
    assert words in re.sub(r"\s+", " ", result.stderr)


def test_a_gpu_that_holds_no_request_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    facts = "target: openai/gpt-oss-120b\ndraft: z-lab/gpt-oss-120b-DFlash\ngpus: l40sx1\npurpose: latency\n"
    facts += "max_seq_len: 131072\n"
    file.write_text(f"description: 65 GB of weights on 48 GB\n{facts}")
    result = run("estimate", str(file), "--tau", "4", "--prompt-tokens", "100000", "--output-tokens", "20000")
    assert result.returncode == 1
    assert "no memory for a single request of 120000 tokens" in " ".join(result.stderr.split())


EXAMPLES = settings(max_examples=30)


@EXAMPLES
@given(st.lists(st.floats(0, 1), min_size=1, max_size=16), st.integers(0, 20))
def test_tau_is_within_1_and_the_block(shares: list[float], k: int) -> None:
    acceptance = AcceptanceProfile(tuple(shares))
    assert 1 <= acceptance.tau(k) <= k + 1
    assert acceptance.tau(k) <= acceptance.tau(k + 1)


@EXAMPLES
@given(st.integers(1, 15), st.floats(0, 1))
def test_from_tau_gives_that_tau(k: int, share: float) -> None:
    tau = 1 + share * k
    assert from_tau(tau, k).tau(k) == pytest.approx(tau)


@pytest.mark.parametrize(("output_tokens", "drafts"), [(1, 0), (2, 0), (3, 1), (5, 3), (11, 9), (1024, 9)])
def test_no_step_drafts_more_than_its_answer_takes(output_tokens: int, drafts: int) -> None:
    traffic, model = Traffic(output_tokens=output_tokens), model_of(MOE)
    found = point(model, "dflash", from_tau(4.7, 9), traffic, 1, 9)
    assert found.num_draft_tokens == drafts
    assert found.tau <= max(1, output_tokens - 1)
    if not drafts:
        assert found.user_rate == point(model, "none", None, traffic, 1, 0).user_rate


def test_taus_and_bands() -> None:
    """GSM8K 5.3 at 9 drafts: the card's own 3.3 at 3 and 4.3 at 5 follow within 0.2."""
    acceptance = from_tau(5.3, 9)
    assert acceptance.tau(3) == pytest.approx(3.3, abs=0.2)
    assert acceptance.tau(5) == pytest.approx(4.3, abs=0.2)
    bands, influences = vary(B300, "trtllm", lambda rates: [rates.read_rate, 1 / rates.gemm_seconds])
    for band in bands:
        assert band.low < band.value < band.high
    moved = {influence.constant: influence for influence in influences}
    assert moved["bandwidth_efficiency"].at_low < 1 < moved["bandwidth_efficiency"].at_high
    assert moved["gemm_seconds"].spread == 0  # it moves the second value, not the first
    assert influences[0].constant == "bandwidth_efficiency"


@pytest.mark.parametrize("tau", [0.5, 11.0])
def test_impossible_tau_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match="tau: expected 1 to 10 for 9 drafts"):
        from_tau(tau, 9)


def test_acceptance_of_a_verify_document(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    file.write_text(
        '{"schema": "dflash-trt/verify/1", "passed": true, "engine": {"source": "x", "acceptance": ['
        '{"position": 2, "proposed": 4, "accepted": 2, "share": 0.5}, {"position": 1, "share": 0.8},'
        '{"position": 3, "share": null}]}}'
    )
    assert read_acceptance(file, 3) == AcceptanceProfile((0.8, 0.5))
    with pytest.raises(ConfigError, match="expected acceptance of 9 drafts, found 3"):
        read_acceptance(file, 9)


VERIFIED = '{"schema": "dflash-trt/verify/1", "engine": {"acceptance": [{"position": 1, "share": %s}]}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected the document of `dflash-trt verify --json`"),
        (VERIFIED % 1e308, "Expected `float` <= 1.0"),
        (
            '{"schema": "dflash-trt/inspect/1", "engine": {"acceptance": []}}',
            "expected a document of dflash-trt verify",
        ),
        (VERIFIED % "null", "no verify pass judged a draft"),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "verify.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_acceptance(file, 1)
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["[1, 2]", "[1, 2, 3, -1]", "[0, 0, 0, 0]", "{}"])
def test_routing_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "routing.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"expected .*4 counts"):
        read_routing(file, 4)


@EXAMPLES
@given(st.sampled_from(NAMES), st.sampled_from(METHODS), st.sampled_from([1, 8, 64, 512]), st.integers(1, 5))
def test_throughput_stays_below_the_memory_roof(name: str, method: Method, batch: int, k: int) -> None:
    model, traffic, acceptance = model_of(name), Traffic(), from_tau(1 + 0.8 * k, k)
    length = 0 if method == "none" else k
    at = point(model, method, acceptance, traffic, batch, length)
    read = model.price(method, StepLoad(batch=batch, num_draft_tokens=length, context=traffic.mean_context)).bytes
    roof = batch * at.tau / (read / model.rates.memory_bandwidth)
    assert at.gpu_rate * model.system.num_gpus <= roof
    assert 1 <= at.tau <= length + 1


def test_speeds() -> None:
    model = model_of(MOE)
    speeds = [point(model, "none", None, Traffic(prompt_tokens=tokens), 32, 0).user_rate for tokens in (1, 1024, 65536)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 1.5 * speeds[2]
    front = [
        OperatingPoint(method="none", batch=1, num_draft_tokens=0, tau=1, step_seconds=1, user_rate=user, gpu_rate=gpu)
        for user, gpu in ((100, 10), (50, 30))
    ]
    assert [rate_at(front, rate) for rate in (75, 101, 10)] == [20, 0, 30]
    assert rate_at([], 10) == 0
    model, traffic, acceptance = model_of(MOE), Traffic(), from_tau(4.7, 9)
    plain = {p.batch: p.user_rate for p in points(model, "none", None, traffic, 4096)}
    dflash = {p.batch: p.user_rate for p in points(model, "dflash", acceptance, traffic, 4096, [9])}
    assert dflash[1] > 2 * plain[1]
    assert dflash[2048] < plain[2048]


@EXAMPLES
@given(st.sampled_from(NAMES), st.sampled_from(METHODS), st.integers(1, 4000), st.integers(1, 100_000))
def test_memory_grows_with_batch_and_context(name: str, method: Method, batch: int, tokens: int) -> None:
    system = system_of(name)

    def used(batch: int, tokens: int) -> int:
        return sum(item.bytes for item in memory_items(system, method, batch, tokens))

    assert used(batch + 1, tokens) > used(batch, tokens)
    assert used(batch, tokens + 100) > used(batch, tokens) or tokens < 128


def test_attention_by_data_parallelism(tmp_path: Path) -> None:
    system = system_of("gpt-oss-120b.b200x2.throughput")
    caches = [memory_items(system, "none", batch, 1000)[-1].bytes for batch in (1, 2, 3)]
    assert caches[0] == caches[1] == caches[2] / 2
    result = run("tune", "gpt-oss-120b.b200x2.throughput", "--slo", "50", "--tau", "4", "-o", str(tmp_path / "a.yaml"))
    assert result.returncode == 1
    assert "enable_attention_dp: expected tensor-parallel attention to tune, found true" in result.stderr


def test_memory_is_that_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Item by item, and what is allocated after the pool takes its part of it."""
    system, schema = system_of(DENSE), load_schema("trtllm")
    deployed = {item.name: item for item in gpu_memory(system.memory, schema).items}
    ours = {item.name: item.bytes for item in memory_items(system, "dflash", system.max_batch_size, 1000)}
    assert ours.pop(CACHES) == system.max_batch_size * request_bytes(replace(system.memory, max_seq_len=1000), schema)
    assert ours == {name: item.bytes for name, item in deployed.items() if not item.is_late}
    plain = {item.name for item in memory_items(system, "none", 1, 1000)}
    assert plain == {"target weights", "runtime", "activations", CACHES}
    limit = batch_limit(system, "dflash", 8192).batch
    monkeypatch.setattr(report, "load_schema", lambda runtime: load_schema(runtime, "1.3.0rc27"))  # with more buffers
    assert batch_limit(system, "dflash", 8192).batch < limit


def test_a_tau_is_taken_from_what_is_published_and_said() -> None:
    lead = run("estimate", CONFIG).stdout.splitlines()[2]
    assert "tau 4.7 at 9 drafts" in lead
    assert "the mean of 3.7 (MT-Bench) to 5.4 (Math500) for 9 drafts, card of z-lab/gpt-oss-120b-DFlash" in lead


def test_a_deployment_is_predicted_for_a_runtime_that_it_is_for() -> None:
    assert default_runtime("qwen3-8b.rtx5090x1.latency") == "vllm"
    assert default_runtime(CONFIG) == "trtllm"


@pytest.mark.parametrize(
    "name",
    [each if index % 8 == 0 else pytest.param(each, marks=pytest.mark.full) for index, each in enumerate(SHIPPED)],
)
def test_every_deployment_holds_its_longest_request(name: str) -> None:
    config = resolved(name)
    runtime = (config.runtimes or ("trtllm",))[0]
    if config.gpus.nodes > 1:
        with pytest.raises(ConfigError, match="node"):
            open_system(name, runtime, None, None)
        return
    system = open_system(name, runtime, None, None)[1]
    assert batch_limit(system, "dflash", system.max_seq_len).batch >= 1


def test_batch_limit_and_where_it_comes_from() -> None:
    dense = batch_limit(system_of(DENSE), "dflash", 8192)
    assert 0 < dense.batch < 200
    assert dense.reason == "memory: caches of requests of 8192 tokens fill h200"
    assert batch_limit(system_of(DENSE), "none", 8192).batch > dense.batch
    assert batch_limit(system_of(DENSE, gpu_memory_bytes=10**9), "none", 8192).reason.startswith("memory: weights")
    by_tokens = batch_limit(system_of(MOE, max_num_tokens=100), "dflash", 100)
    assert (by_tokens.batch, by_tokens.reason) == (100, "max_num_tokens 100: each request verifies at least 1")
    assert batch_limit(system_of(ENGINE), "dflash", 32768).batch < batch_limit(system_of(MOE), "dflash", 32768).batch
