# SPDX-License-Identifier: Apache-2.0
"""Deployment files: what they may say, that all shipped ones pass every check, and the catalogue of their drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from dflash_trt.checkpoint.dialects.recognise import DIALECTS
from dflash_trt.cli import cli
from dflash_trt.deploy.catalog import Catalog, catalog, drafts_for
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.deployment_file import Eagle3, deployment_path, load_deployment, shipped_deployments
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.deploy.parsers import missing_parsers, target_parsers
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Runtime, schemas, versions
from dflash_trt.errors import ConfigError
from dflash_trt.observe.diagnosis.published_tau import published_draft_tau
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import Traffic, point
from dflash_trt.observe.estimate.inputs import open_acceptances, system
from dflash_trt.observe.estimate.step import StepModel
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS, NAMES, RUNTIMES, SERVED, config_of, findings, rendered, resolved
from tests.paths import REPOSITORY
from tools.catalog_page import replace_catalogue


def test_the_catalogue_holds_every_draft_and_deployment() -> None:
    drafts = {known.draft: known for known in catalog().drafts}
    assert published_drafts().keys() <= drafts.keys()
    for draft, known in drafts.items():
        if draft in published_drafts():
            assert known.target == published_drafts()[draft].target
    files = {
        file.name: re.search(r"^draft: *(\S+)", file.read_text(), re.M)[1]  # type: ignore[index]
        for file in (REPOSITORY / "build_configs").glob("*.yaml")
    }
    assert {name: draft for draft, known in drafts.items() for name in known.deployments} == files
    names = {dialect.name for dialect in DIALECTS}
    assert {known.family for known in catalog().drafts} == catalog().families.keys()
    assert {family.dialect for family in catalog().families.values()} - {None} <= names
    # After a change of the data: make catalog
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    assert replace_catalogue(text) == text


@pytest.mark.parametrize(
    ("target", "vllm"),
    [
        ("openai/gpt-oss-120b", "openai"), ("/models/gpt-oss-120b", "openai"), ("unsloth/Qwen3-8B-FP8", "hermes"),
        ("./Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"), ("meta-models/Muse-Glimmer-30B", "muse_glimmer"),
        ("/models/snapshots/0f2c", None),
    ],
)  # fmt: skip
def test_parsers_are_those_of_the_family(target: str, vllm: str | None) -> None:
    """A copy has another owner, or is a directory; without a family's name the user is told."""
    assert target_parsers(target).tool.get("vllm") == vllm
    assert ("plain text" in missing_parsers(target, "vllm")) == (vllm is None)


def test_drafts_of_all_targets_and_of_one() -> None:
    document = json.loads(run("drafts", "--json").stdout)
    assert len(document["drafts"]) == len(catalog().drafts)
    document = json.loads(run("drafts", "qwen/qwen3-8b", "--json").stdout)
    kinds = {each["draft"]: each["kind"] for each in document["drafts"]}
    assert kinds.keys() == {
        "z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7", "deepseek-ai/dflash_qwen3_8b_block7",
        "Dogacel/Qwen3-8B-DSpark", "JetSpec/jetspec-qwen3-8b", "RedHatAI/Qwen3-8B-speculator.dflash",
    }  # fmt: skip
    assert document["kinds"]["gains"]["LiLiCorr"]["speedup"] > document["kinds"]["gains"]["DFlash"]["speedup"]
    assert kinds["deepseek-ai/dflash_qwen3_8b_block7"] == "anchor-first DFlash"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("nvidia/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("/models/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("RedHatAI/GLM-5.3-Flash-FP8", "zai-org/GLM-5.3-Flash"),  # does not match GLM-5.3
    ],
)
def test_a_copy_of_a_target_has_its_drafts(target: str, expected: str) -> None:
    assert {draft.target for draft in drafts_for(target)} == {expected}


def test_a_target_without_a_known_draft() -> None:
    shown = run("drafts", "meta-llama/Llama-4-Scout")
    assert (shown.returncode, "no draft is known for" in shown.stderr) == (1, True)


def undocumented(known: Catalog) -> list[str]:
    """Rows without a source of their facts, the day or month of its reading, a kind, or figures with theirs."""
    published = published_drafts()
    return [
        draft.draft
        for draft in known.drafts
        if not (
            (draft.draft in published or draft.source)
            and re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?", draft.read)
            and draft.kind_name != "?"
            and all(speedup.source and speedup.setting for speedup in draft.speedups)
            and (draft.tau is None or re.fullmatch(r"\d+\.\d+ \(.+\)", draft.tau))
        )
    ]


def test_every_row_has_a_source_and_a_date() -> None:
    assert undocumented(catalog()) == []
    for change in ({"source": None}, {"read": "recently"}, {"kind": None}, {"read": ""}, {"tau": "5.3"}):
        row = msgspec.structs.replace(catalog().drafts[-1], **change)
        assert undocumented(msgspec.structs.replace(catalog(), drafts=(row,))) == [row.draft], change


GOOD = "description: mine\ntarget: T\ndraft: D\ngpus: b300x8\npurpose: latency\n"


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return load_deployment(file)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of what lies beside the file are; repository ids and recipes stay as they are."""
    for directory in ("models/target", "models/draft", "eagle3"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "own.yaml").touch()
    file = tmp_path / "mine.yaml"
    text = "description: mine\ngpus: b300x8\npurpose: latency\n"
    file.write_text(
        f"{text}target: models/target\ndraft: ./models/draft\nrecipe: own.yaml+fp8-kv\neagle3: {{model: eagle3}}\n"
    )
    for elsewhere, given, prefix in ((tmp_path, "mine.yaml", ""), (tmp_path / "models", "../mine.yaml", "../")):
        monkeypatch.chdir(elsewhere)
        found = load_deployment(Path(given))
        assert found.eagle3 is not None
        names = [found.target, found.draft, found.recipe, found.eagle3.model]
        assert names == [f"{prefix}{name}" for name in ("models/target", "models/draft", "own.yaml+fp8-kv", "eagle3")]
    file.write_text(f"{text}target: models/other\ndraft: {tmp_path}/models/draft\nrecipe: fp8+fp8-kv\n")
    found = load_deployment(file)
    assert (found.target, found.draft, found.recipe) == ("models/other", f"{tmp_path}/models/draft", "fp8+fp8-kv")


def test_a_handful_of_lines_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + "eagle3: {model: E}\n")
    loaded = load_deployment(file)
    assert (loaded.mode, loaded.recipe, loaded.prefix_reuse, loaded.max_batch_size) == ("native", "bf16", None, None)
    assert loaded.eagle3 == Eagle3(model="E", num_draft_tokens=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "max_batch_size: 0\n", "max_batch_size: expected `int` >= 1, found 0"),
        (GOOD + "num_draft_tokens: 0\n", "num_draft_tokens: expected `int` >= 1"),
        (GOOD + "kv_cache_fraction: 1.5\n", "kv_cache_fraction: expected `float` < 1.0, found 1.5"),
        (GOOD + "eagle3: {model: x, num_draft_tokens: -1}\n", "eagle3.num_draft_tokens: expected `int` >= 1, found -1"),
    ],
)
def test_bounds(tmp_path: Path, text: str, message: str) -> None:
    """The other messages of the reader are tested in tests/files/test_strict_yaml.py."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message


SHIPPED = "gpt-oss-120b.b300x8.latency"


def test_names_of_deployments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(shipped_deployments()) == NAMES
    for name in (SHIPPED, f"{SHIPPED}.yaml"):
        assert deployment_path(name) == BUILD_CONFIGS / f"{SHIPPED}.yaml"
    # `build NAME` writes an engine directory called NAME, which the next command means
    monkeypatch.chdir(tmp_path)
    Path(SHIPPED).mkdir()
    assert deployment_path(SHIPPED) is None
    Path(f"{SHIPPED}.yaml").write_text(GOOD)
    assert deployment_path(f"{SHIPPED}.yaml") == Path(f"{SHIPPED}.yaml")
    Path("b.yml").write_text(GOOD)
    assert deployment_path("b.yml") == Path("b.yml")


@pytest.mark.parametrize("name", ["z-lab/gpt-oss-120b-DFlash", "engine", "", "x" * 5000, f"some/{SHIPPED}"])
def test_what_is_no_deployment(name: str) -> None:
    assert deployment_path(name) is None


@pytest.mark.parametrize(
    ("name", "near"), [(f"{SHIPPED}x", f" (nearest name: {SHIPPED})"), (f"{SHIPPED[:-1]}.yaml", SHIPPED), ("q.yml", "")]
)
def test_an_unknown_name_gives_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: neither a path here nor .*{re.escape(near)}") as caught:
        deployment_path(name)
    assert caught.value.hint == "dflash-trt serve-config --list"


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gpt-oss-120b.b300x8"])
def test_the_beginning_of_names_gives_all_of_them(name: str) -> None:
    begun = sorted(file.stem for file in (REPOSITORY / "build_configs").glob(f"{name}.*.yaml"))
    result = CliRunner().invoke(cli, ["serve-config", name])
    assert isinstance(result.exception, ConfigError)
    assert f"found the beginning of {len(begun)}" in str(result.exception)
    assert result.exception.hint == f"one of {', '.join(begun)}"


NAME = re.compile(r"(?P<model>[a-z0-9.-]+)\.(?P<gpus>[a-z0-9]+x[1-8])\.(?P<purpose>latency|throughput|[a-z0-9-]+)")


@pytest.mark.parametrize(("name", "runtime"), SERVED)
def test_resolves_renders_and_passes(name: str, runtime: Runtime) -> None:
    for version in versions(runtime):
        assert [f for f in findings(name, runtime, version=version) if f.severity == ERROR] == []
    assert "127.0.0.1" in rendered(name, runtime).text or runtime == "trtllm"
    # Every warning has its reason in the file, and every reason its warning
    warned = {finding.rule for finding in findings(name, runtime) if finding.severity == WARNING}
    accepted = set(resolved(name).accepted_warnings)
    assert warned <= accepted
    assert accepted <= {"target-family", "memory"}
    assert warned == accepted or runtime != "trtllm"


def test_a_runtime_that_cannot_serve_a_deployment() -> None:
    """TensorRT-LLM has no speculative worker for Gemma 4; attention data parallelism is written for it alone.

    On RTX GPUs and GB10 only vLLM is known to run DFlash.
    """
    expected = {(name, "trtllm") for name in NAMES if name.startswith("gemma-4-")}
    expected |= {("gpt-oss-120b.b200x2.throughput", runtime) for runtime in ("vllm", "sglang")}
    sm = {name: resolved(name).gpus.gpu.compute_capability for name in NAMES}
    expected |= {(name, runtime) for name in NAMES if sm[name] >= (12, 0) for runtime in ("trtllm", "sglang")}
    expected |= {(name, "trtllm") for name in NAMES if sm[name] == (8, 9)}
    assert {(name, runtime) for name in NAMES for runtime in RUNTIMES} - set(SERVED) == expected
    for name, runtime in expected:
        with pytest.raises(ConfigError, match=f"^{name} cannot be served by .+, only by "):
            rendered(name, runtime)
    file = load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b200x2.throughput.yaml")
    with pytest.raises(ConfigError, match="enable_attention_dp: expected a deployment for TensorRT-LLM alone"):
        resolve(msgspec.structs.replace(file, runtimes=None), "mine")
    with pytest.raises(ConfigError, match="eagle3: expected the EAGLE-3 drafter"):
        rendered("kimi-k2.5.b300x8.latency", "trtllm", "eagle3")


SERVING = (
    "triton-repo NAME -o OUT", "generate NAME text", "verify NAME --target T --prompts OUT",
    "estimate NAME --runtime trtllm",
)  # fmt: skip


@pytest.mark.parametrize("command", SERVING)
def test_no_command_serves_what_a_deployment_rules_out(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "b"}\n')
    for name in ("gemma-4-31b.h200x1.latency", "qwen3-8b.rtx5090x1.latency"):
        words = command.replace("NAME", name).replace("OUT", str(tmp_path / "prompts.jsonl")).split()
        result = run(*words)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"{name} cannot be served by TensorRT-LLM, only by vLLM" in result.stderr
        assert "hint: serve-config --runtime vllm writes its configuration" in result.stderr


def test_a_dry_run_is_about_a_runtime_that_can_serve_it() -> None:
    for name, runtime in (("gemma-4-31b.h200x1.latency", "vllm"), ("gpt-oss-120b.b300x8.latency", "trtllm")):
        result = run("build", name, "--dry-run", "--json")
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        assert document["runtime"] == runtime
        defaults = [setting["key"] for setting in document["settings"] if "." in setting["key"]]
        assert bool(defaults) == (runtime == "trtllm")


def test_nvidia_s_throughput_configuration() -> None:
    """examples/configs/curated/gpt-oss-120b-throughput.yaml @ 25f307ee, with a drafter beside it."""
    arguments = rendered("gpt-oss-120b.b200x2.throughput", "trtllm").arguments
    expected = {
        "max_batch_size": 720, "max_num_tokens": 16384, "tensor_parallel_size": 2, "moe_expert_parallel_size": 2,
        "enable_attention_dp": True, "cuda_graph_config": {"enable_padding": True, "max_batch_size": 720},
        "moe_config": {"backend": "TRTLLM"}, "stream_interval": 20, "num_postprocess_workers": 4,
        "attention_dp_config": {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1},
    }  # fmt: skip
    assert arguments | expected == arguments
    assert rendered("gpt-oss-120b.b200x8.throughput", "trtllm").arguments["enable_attention_dp"] is False


def test_python_of_a_repository_is_run_where_the_file_says_so() -> None:
    trusting = {name for name in NAMES if resolved(name).file.trust_remote_code}
    assert trusting == {name for name in NAMES if name.startswith("kimi-")}
    for runtime in RUNTIMES:
        assert rendered("kimi-k2.5.b300x8.latency", runtime).arguments["trust_remote_code"] is True
        (finding,) = [f for f in findings("kimi-k2.5.b300x8.latency", runtime) if f.rule == "remote-code"]
        assert "is run" in finding.problem
        trusted = resolved("kimi-k2.6.b300x8.latency")
        wary = msgspec.structs.replace(trusted, file=msgspec.structs.replace(trusted.file, trust_remote_code=False))
        assert [f.severity for f in check(config_of(wary, runtime)) if f.rule == "remote-code"] == [ERROR]


def test_the_name_says_what_it_is() -> None:
    for name in NAMES:
        deployment, match = resolved(name), NAME.fullmatch(name)
        assert match["gpus"] == str(deployment.gpus), name
        suffix, is_engine = match["purpose"], deployment.mode == "engine"
        said = suffix.removeprefix("throughput-") if is_engine else suffix
        assert said == (deployment.file.recipe if is_engine else deployment.file.purpose), name
        model = deployment.target.partition("/")[2].lower().removesuffix("-it").removesuffix("-instruct")
        assert match["model"] == model, name
        assert len((BUILD_CONFIGS / f"{name}.yaml").read_text().splitlines()) <= 16, name


def test_every_draft_of_z_lab_has_a_deployment_on_hopper_and_on_blackwell() -> None:
    sm = {name: resolved(name).gpus.gpu.compute_capability for name in NAMES}
    for lowest, above in (((9, 0), (10, 0)), ((10, 0), (12, 0))):
        deployed = {resolved(name).checkpoint for name in NAMES if lowest <= sm[name] < above}
        assert {draft for draft in published_drafts() if draft.startswith("z-lab/")} <= deployed


@pytest.mark.full
@pytest.mark.parametrize("runtime", ["trtllm", "vllm"])
def test_fewer_drafts_are_written_where_a_block_is_predicted_not_to_pay(runtime: Runtime) -> None:
    """At the largest batch of each deployment whose draft's acceptance is published."""
    written = {"trtllm": "draft_len_schedule", "vllm": "num_speculative_tokens_per_batch_size"}[runtime]
    found = 0
    for name in NAMES:
        deployment = resolved(name)
        if runtime not in deployment.runtimes or deployment.gpus.nodes > 1:  # no estimates for several nodes
            continue
        estimated = system(deployment, runtime)
        if (published := published_draft_tau(deployment.checkpoint)) is None:
            continue
        acceptance = open_acceptances(estimated, None, published.mean)[0]["dflash"]
        model = StepModel(estimated, rates(estimated.gpu, runtime))
        batch, length = deployment.max_batch_size, deployment.num_draft_tokens
        drafting = point(model, "dflash", acceptance, Traffic(), batch, length).user_rate
        pays = drafting > point(model, "none", None, Traffic(), batch, 0).user_rate
        assert pays or written in rendered(name, runtime).arguments["speculative_config"], name
        found += not pays
    assert found


def test_every_published_draft_has_a_deployment() -> None:
    deployed = {resolved(name).checkpoint for name in NAMES}
    assert deployed == set(published_drafts())
    for name in NAMES:
        assert published_drafts()[resolved(name).checkpoint].target == resolved(name).target


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_methods_differ_in_nothing_but_the_method(runtime: Runtime) -> None:
    """Prefix caches aside, which drafts may not bear and plain decoding keeps."""
    name, caches = "gpt-oss-120b.b300x8.latency", {"enable_prefix_caching", "disable_radix_cache"}
    of = {method: rendered(name, runtime, method).arguments for method in ("dflash", "eagle3", "none")}
    for arguments in of.values():
        common = {key: value for key, value in arguments.items() if not key.startswith("speculative")}
        assert common.keys() - of["none"].keys() <= caches
        assert common.items() >= of["none"].items()
    assert len({str(arguments) for arguments in of.values()}) == 3


def test_how_the_server_is_started() -> None:
    engine = rendered("gpt-oss-120b.b300x8.nvfp4", "trtllm")
    assert engine.start("FILE").startswith("python -m dflash_trt.trtllm trtllm-serve ")
    assert engine.arguments["speculative_config"]["speculative_model"] == "gpt-oss-120b.b300x8.nvfp4"
    assert rendered("gpt-oss-120b.b300x8.nvfp4", "trtllm", "none").start("FILE").startswith("trtllm-serve ")
    assert rendered("gpt-oss-120b.b300x8.latency", "trtllm").start("FILE").startswith("trtllm-serve ")
    # precedence of flag and file changed between releases of TensorRT-LLM
    start = rendered("gpt-oss-120b.b300x8.latency", "trtllm").start("FILE").split()
    assert [word for word in start if word.startswith("-")] == ["--host", "--port", "--config"]


def parses_answers(name: str, runtime: Runtime) -> bool:
    """Reasoning and tool calls; gpt-oss's by trtllm-serve on its own, and Llama's not at all by it."""
    written = rendered(name, runtime)
    no_source = ("glm-5.3", "qwen3.8", *(("muse-glimmer",) if runtime == "trtllm" else ()))
    if runtime == "trtllm":
        return ("--tool_parser" in written.start("FILE")) == (not name.startswith(("gpt-oss", "llama", *no_source)))
    if name.startswith(no_source):
        return "tool_call_parser" not in written.arguments
    has_reasoning = not name.startswith(("llama", "qwen3-coder"))
    is_chosen = written.arguments.get("enable_auto_tool_choice", runtime == "sglang") is True
    has_parser = bool(written.arguments.get("tool_call_parser"))
    return has_parser and is_chosen and ("reasoning_parser" in written.arguments) == has_reasoning


def test_answers_are_parsed() -> None:
    assert [served for served in SERVED if not parses_answers(*served)] == []


def test_runtimes_have_schemas() -> None:
    assert {runtime for runtime, _ in schemas()} == set(RUNTIMES)
    assert versions("trtllm") == ["1.3.0rc27", "1.4.0rc1"]


@pytest.mark.parametrize("name", [name for name in NAMES if "DFlash2" in resolved(name).checkpoint])
def test_a_dflash2_draft_never_gets_kernels_that_refuse_its_windows(name: str) -> None:
    """On any GPU; and all runtimes draft a whole block."""
    for gpus in ("b300x8", "h200x8"):
        file = msgspec.structs.replace(load_deployment(BUILD_CONFIGS / f"{name}.yaml"), gpus=gpus)
        assert resolve(file, name).draft_attention == "VANILLA"
    K = published_drafts()[resolved(name).checkpoint].spec.num_draft_tokens
    assert rendered(name, "trtllm").arguments["speculative_config"]["max_draft_len"] == K
    assert rendered(name, "vllm").arguments["speculative_config"]["num_speculative_tokens"] == K
    assert rendered(name, "sglang").arguments["speculative_num_draft_tokens"] == K + 1
