# SPDX-License-Identifier: Apache-2.0
"""Deployments resolved: what wins, what is then asked of a GPU, and draft lengths by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dflash_trt.checkpoint.target_cache import RecurrentState
from dflash_trt.deploy.batch_schedule import read_schedule, trtllm_schedule, vllm_schedule
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.deployment_file import DeploymentFile, load_deployment
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.memory import gpu_memory, is_dense, is_fp8_context, request_bytes
from dflash_trt.deploy.resolve import pairs_pools, resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, ServingLoad
from dflash_trt.deploy.rules.memory_rules import document_load
from dflash_trt.deploy.runtime_arguments import RuntimeArguments
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.sizes import target_sizes
from dflash_trt.deploy.weight_commands import weight_commands
from dflash_trt.errors import ConfigError
from tests.checkpoint.dialect_samples import write_dspark
from tests.cli.commands import run_here
from tests.deploy.deployments import BUILD_CONFIGS, RUNTIMES, arguments, config_of, findings, resolved
from tests.paths import FIXTURES

SCHEDULE = {1: 9, 17: 4, 65: 0}


def scheduled(schedule: dict[int, int], **changes: Any) -> ResolvedDeployment:
    file = load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml")
    return resolve(msgspec.structs.replace(file, draft_schedule=schedule, **changes), "x")


def test_the_words_of_each_runtime() -> None:
    """TensorRT-LLM counts up to a batch, vLLM from one to another; both end where the deployment does."""
    schedule = read_schedule(SCHEDULE, 9, "x")
    assert trtllm_schedule(((1, 9), (17, 4), (65, 1)), 256) == {16: 9, 64: 4, 256: 1}
    assert vllm_schedule(schedule, 256) == [[1, 16, 9], [17, 64, 4], [65, 256, 0]]
    assert trtllm_schedule(schedule, 64) == {16: 9, 64: 4}
    assert vllm_schedule(schedule, 16) == [[1, 16, 9]]
    deployment = resolve(load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"), "x")
    assert "draft_len_schedule" not in arguments(deployment, "trtllm")["speculative_config"]
    with pytest.raises(ConfigError, match="expected one draft length, which is all that SGLang takes"):
        arguments(scheduled(SCHEDULE), "sglang")


@pytest.mark.parametrize("runtime", ["trtllm", "vllm"])
def test_a_scheduled_deployment_passes_its_own_check(runtime: Runtime) -> None:
    deployment = scheduled(SCHEDULE if runtime == "vllm" else {1: 9, 17: 4, 65: 1}, max_batch_size=128)
    spec = arguments(deployment, runtime)["speculative_config"]
    expected = {"draft_len_schedule": {16: 9, 64: 4, 128: 1}}
    if runtime == "vllm":
        expected = {"num_speculative_tokens_per_batch_size": [[1, 16, 9], [17, 64, 4], [65, 128, 0]]}
    assert expected.items() <= spec.items()
    assert [finding for finding in check(config_of(deployment, runtime)) if finding.severity == "error"] == []


def test_a_step_without_drafts_is_never_written_for_tensorrt_llm() -> None:
    """The worker returns before it stores the step's context rows."""
    with pytest.raises(ConfigError, match="expected 1 or more drafts for every batch with TensorRT-LLM, found 0") as no:
        arguments(scheduled(SCHEDULE, max_batch_size=128), "trtllm")
    assert str(no.value.hint).startswith("set max_batch_size to 64, or write 1")
    assert arguments(scheduled(SCHEDULE, max_batch_size=64), "trtllm")["speculative_config"]["draft_len_schedule"]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({2: 9}, "expected to begin with batch 1 and num_draft_tokens 9, found {2: 9, ...}"),
        ({1: 4}, "expected to begin with batch 1 and num_draft_tokens 9, found {1: 4, ...}"),
        ({1: 9, 8: 10}, "expected at most num_draft_tokens 9, found 10 from batch 8 on"),
    ],
)
def test_schedules_that_cannot_be_meant(schedule: dict[int, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduled(schedule)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"draft_len_schedule": {4: 8, 64: 2}}, "error", "expected max_draft_len 9 at first and never more"),
        ({"draft_len_schedule": {4: 9, 8: 10, 64: 2}}, "error", "expected max_draft_len 9 at first and never more"),
        ({"draft_len_schedule": {4: 9, 8: 2}}, "error", "found none beyond batch 8; write 1"),
        ({"draft_len_schedule": {4: 9, 64: 0}}, "error", "a step without drafts stores no context"),
        ({"draft_len_schedule": {64: 9}, "max_concurrency": 8}, "error", "expected it or max_concurrency, found both"),
        ({"draft_len_schedule": {"a": 9}}, "error", "expected batch sizes and draft lengths"),
    ],
)
def test_files_of_others(change: dict[str, Any], severity: str, words: str) -> None:
    deployment = scheduled({1: 9})
    document = arguments(deployment, "trtllm")
    document["speculative_config"] = {**document["speculative_config"], **change}
    (finding,) = [f for f in check(config_of(deployment, document=document)) if f.rule == "draft-schedule"]
    assert finding.severity == severity
    assert words in str(finding)


FILE = load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.nvfp4.yaml")


def changed(**changes: Any) -> DeploymentFile:
    return msgspec.structs.replace(FILE, **changes)


def asked(deployment: ResolvedDeployment, runtime: Runtime) -> ServingLoad:
    """The load of each GPU by the runtime's arguments."""
    return document_load(config_of(deployment, runtime))


def found(deployment: ResolvedDeployment) -> list[Finding]:
    return check(config_of(deployment))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_is_asked_for_the_same(runtime: Runtime) -> None:
    load = asked(resolved("gpt-oss-120b.b300x8.latency"), runtime)
    assert (load.tensor_parallel, load.num_ranks, load.num_draft_tokens) == (8, 8, 9)
    assert (load.max_batch_size, load.max_num_tokens, load.max_seq_len) == (64, 16384, 32768)
    assert load.kv_cache_dtype == "auto"
    assert not is_dense(load, load_schema(runtime))
    halved = msgspec.structs.replace(load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"),
                                     kv_cache_dtype="fp8")  # fmt: skip
    load = asked(resolve(halved, "x"), runtime)
    assert load.kv_cache_dtype == "fp8"
    assert is_fp8_context(load, load_schema(runtime)) is (runtime != "trtllm")  # there it has fc's dtype


@pytest.mark.parametrize("ranks", [1, 8])
def test_engine_mode_asks_every_gpu_for_a_whole_drafter_or_its_share(ranks: int) -> None:
    load = asked(resolve(changed(num_ranks=ranks), "x"), "trtllm")
    assert (load.tensor_parallel, load.num_ranks, load.draft_attention) == (8, ranks, "TRTLLM")
    assert load.algorithms["layers.0.self_attn.q_proj"] == "NVFP4"
    base = asked(resolve(FILE, "x"), "vllm")
    assert (base.num_ranks, base.algorithms) == (8, {})


def test_what_fits_the_pool() -> None:
    """A request's pages hold eight times the rows of a drafter whose heads are shared."""
    load = asked(resolve(FILE, "x"), "trtllm")
    schema = load_schema("trtllm")
    whole, shared = (request_bytes(msgspec.structs.replace(load, num_ranks=n), schema) for n in (1, load.num_ranks))
    row = load.draft_sizes.spec.context_bytes_per_token(fp8=False, num_ranks=1)
    assert whole - shared == load.max_seq_len * row * 7 // 8
    # A pool of no size needs nothing, but the rest must still fit
    load = asked(resolve(changed(max_batch_size=4096, max_num_tokens=65536, draft_attention="VANILLA"), "x"), "trtllm")
    assert not gpu_memory(msgspec.structs.replace(load, target_sizes=None, kv_cache_fraction=0.0), schema).fits


def test_what_each_mode_refuses() -> None:
    refused = [f for f in found(resolve(changed(mode="native", num_ranks=None), "x")) if f.rule == "quantized-context"]
    assert len(refused) == 1
    assert not [f for f in found(resolve(FILE, "x")) if f.rule in ("quantized-context", "backbone")]
    assert not [f for f in findings("gpt-oss-120b.b300x8.nvfp4", "vllm") if f.rule == "quantized-context"]
    for attention, rules in (("TRTLLM", []), ("VANILLA", []), ("FA4", ["draft-attention"])):
        said = found(resolve(changed(draft_attention=attention), "x"))
        assert [f.rule for f in said if f.rule in ("draft-attention", "graph-padding")] == rules


LOCAL = str(FIXTURES / "tiny-gpt-oss-dflash")
ITSELF = RuntimeArguments(trtllm={"speculative_config": {"speculative_model": LOCAL}})


@pytest.mark.parametrize(
    ("changes", "severity", "made"),
    [
        ({"recipe": "nvfp4-native"}, None, ["dflash-trt build x.yaml"]),
        ({}, UNCHECKED, [f"dflash-trt quantize {LOCAL} --recipe bf16 -o tiny-gpt-oss-dflash-bf16"]),
        ({"draft": str(FIXTURES / "tiny-qwen3-dflash"), "target": str(FIXTURES / "tiny-qwen3")}, None, []),
        ({"recipe": "nvfp4-native", "runtime_arguments": ITSELF}, ERROR, None),
        ({"draft": "z-lab/gpt-oss-120b-DFlash", "target": "openai/gpt-oss-120b", "recipe": "nvfp4-native"}, None, None),
    ],
)
def test_a_draft_with_gpt_oss_layers_is_copied(
    changes: dict[str, Any], severity: str | None, made: list[str] | None
) -> None:
    """A recipe's copy has dense layers; without a recipe TensorRT-LLM gets a copy in BF16."""
    values = {"target": str(FIXTURES / "tiny-gpt-oss"), "draft": LOCAL, "mode": "native", "recipe": "bf16"}
    deployment = resolve(changed(**{"num_ranks": None, **values, **changes}), "x")
    assert [f.severity for f in found(deployment) if f.rule == "backbone"] == ([] if severity is None else [severity])
    assert made is None or list(weight_commands(deployment, "x.yaml", "trtllm", "dflash")) == made


def test_the_files_own_words_win() -> None:
    asked = {"max_batch_size": 7, "num_draft_tokens": 4, "tensor_parallel": 4, "num_ranks": 4}
    deployment = resolve(changed(**asked, prefix_reuse=True), "x")
    assert deployment.num_ranks == 4
    assert (deployment.max_batch_size, deployment.num_draft_tokens, deployment.tensor_parallel) == (7, 4, 4)
    for key in ("max_batch_size", "num_draft_tokens", "tensor_parallel", "prefix_reuse", "mode", "recipe"):
        assert deployment.sources[key] == "file"
    assert deployment.sources["max_seq_len"] == "default for latency"
    assert deployment.sources["kv_cache_dtype"] == "default"
    assert deployment.sources["moe_backend"] == "published for SM 10.3"
    assert resolved("qwen3-8b.h200x1.latency").sources["moe_backend"] == "runtime's own choice"


@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({}, True),
        ({"draft_attention": "VANILLA"}, False),
        ({"kv_cache_dtype": "fp8"}, False),
        ({"prefix_reuse": False}, False),
        ({"prefix_reuse": True, "draft_attention": "VANILLA"}, True),
        ({"target": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, False),
    ],
)
def test_prefixes_are_reused_where_the_pools_are_paired(changes: dict[str, Any], reused: bool) -> None:
    """In TensorRT-LLM; other runtimes do what the file asks for, else what their drafters bear."""
    deployment = resolve(changed(**changes), "x")
    cache = arguments(deployment)["kv_cache_config"]
    assert cache["enable_block_reuse"] == reused
    assert cache.get("use_kv_cache_manager_v2", False) == (reused and deployment.draft_attention == "TRTLLM")
    vllm, sglang = (arguments(deployment, runtime) for runtime in RUNTIMES[1:])
    assert vllm["enable_prefix_caching"] == changes.get("prefix_reuse", False)
    assert sglang["disable_radix_cache"] == (not changes.get("prefix_reuse", True))
    rules = [f.severity for f in found(deployment) if f.rule == "prefix-reuse"]
    assert rules == ([] if not reused else [UNCHECKED] if not changes else [ERROR])


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_plain_decoding_keeps_the_cache_that_users_have(runtime: Runtime, asked: bool | None) -> None:
    deployment = resolve(changed(**{} if asked is None else {"prefix_reuse": asked}), "x")
    plain = arguments(deployment, runtime, "none")
    off = {
        "trtllm": not plain.get("kv_cache_config", {}).get("enable_block_reuse"),
        "vllm": plain.get("enable_prefix_caching") is False,
        "sglang": plain.get("disable_radix_cache") is True,
    }
    assert off[runtime] == (asked is False)


def test_pools_of_a_target_with_recurrent_states_are_not_paired(tmp_path: Path) -> None:
    target = target_sizes(str(FIXTURES / "tiny-qwen3"))
    sizes = ("num_layers", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "kernel")
    state = RecurrentState(**dict.fromkeys(sizes, 1))
    hybrid = msgspec.structs.replace(target, cache=msgspec.structs.replace(target.cache, recurrent=state))
    assert pairs_pools("TRTLLM", "auto", target)
    assert not pairs_pools("TRTLLM", "auto", hybrid)
    config = config_of(msgspec.structs.replace(resolve(FILE, "x"), target_sizes=hybrid))
    (said,) = [f for f in check(config) if f.rule == "prefix-reuse"]
    assert "a target with recurrent states" in str(said)


def test_the_default_context_and_the_digest(tmp_path: Path) -> None:
    """The fixtures have 8192 positions."""
    pair: dict[str, Any] = {"draft": str(FIXTURES / "tiny-qwen3-dflash"), "target": str(FIXTURES / "tiny-qwen3")}
    pair |= {"mode": "native", "gpus": "h100x1", "recipe": "bf16", "num_ranks": None}
    deployment = resolve(changed(**pair), "x")
    assert deployment.max_seq_len == 8192
    assert deployment.sources["max_seq_len"] == "max_position_embeddings of draft and target"
    longer = changed(max_seq_len=9000, **pair)
    assert resolve(longer, "x").max_seq_len == 9000
    text = (BUILD_CONFIGS / "gpt-oss-120b.b300x8.nvfp4.yaml").read_text()
    (tmp_path / "x.yaml").write_text(f"# mine\n{text}")
    assert resolve(load_deployment(tmp_path / "x.yaml"), "x").digest == resolve(FILE, "x").digest
    assert resolve(changed(max_batch_size=7), "x").digest != resolve(FILE, "x").digest


def test_ranks_divide_the_gpus_and_the_heads() -> None:
    with pytest.raises(ConfigError, match="x: tensor_parallel: expected a divisor of the 8 GPUs of ") as caught:
        resolve(changed(tensor_parallel=3), "x")
    assert caught.value.hint == "set tensor_parallel to 1 or 2 or 4 or 8"
    with pytest.raises(
        ConfigError, match=r"x: tensor_parallel: expected a divisor of the \d+ attention heads of "
    ) as caught:
        resolve(changed(gpus="b300x3", tensor_parallel=3), "x")
    assert caught.value.hint == "set tensor_parallel to 1"
    with pytest.raises(ConfigError, match="x: expert_parallel: expected a divisor of the 4 ranks") as caught:
        resolve(changed(tensor_parallel=4, expert_parallel=1_000_000), "x")
    assert caught.value.hint == "set expert_parallel to 1 or 2 or 4"


def test_what_a_checkpoint_says_of_its_quantisation_wins(tmp_path: Path) -> None:
    draft = tmp_path / "quantised"
    run_here("quantize", FIXTURES / "tiny-qwen3-dflash", "-o", draft, "--recipe", "nvfp4-native")
    pair = {"target": str(FIXTURES / "tiny-qwen3"), "draft": str(draft)}
    file = changed(**pair, recipe="bf16", mode="native", gpus="b300x1", num_ranks=None)
    deployment = resolve(file, "x")
    assert set(deployment.algorithms.values()) == {"NVFP4"}
    assert "layers.0.self_attn.q_proj" not in deployment.algorithms
    assert deployment.draft == str(draft)


def test_a_file_that_serves_an_engine_directory_is_checked_in_engine_mode(tmp_path: Path) -> None:
    draft, target, engine = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss", tmp_path / "engine"
    run_here("build", draft, "--target", target, "-o", engine, "--recipe", "nvfp4")
    pair = {"target": str(target), "draft": str(engine), "num_ranks": None}
    deployment = resolve(changed(**pair, gpus="b300x1"), "x", draft=str(engine))
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(arguments(deployment)))
    schema, gpus = load_schema("trtllm", None), parse_gpus("b300x1", "gpus")
    config = file_configs(file, schema, gpus=gpus, target=str(target), draft=None)[0]
    assert config.served.mode == "engine"
    assert [f.rule for f in check(config)] == ["prefix-reuse"]  # only the log shows the pool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "native"}, "expected none in native mode, whose runtime divides the drafter, found 8"),
        ({"num_ranks": 4}, "expected 1 or the 8 ranks of tensor_parallel, found 4"),
        ({"enable_attention_dp": True, "runtimes": ("trtllm",)}, "expected 1 beside enable_attention_dp"),
        ({"gpus": "b300x3", "tensor_parallel": 1}, "expected 1 or the 1 ranks of tensor_parallel, found 8"),
        (
            {"draft": str(FIXTURES / "tiny-gpt-oss-dflash"), "target": str(FIXTURES / "tiny-gpt-oss"),
             "tensor_parallel": 4, "num_ranks": 4},
            "expected KV heads that 4 ranks share evenly, found 2",
        ),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_the_drafter(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^x: num_ranks: {message}"):
        resolve(changed(**changes), "x")


@pytest.mark.parametrize("ranks", [None, 1])
def test_every_rank_can_run_a_whole_dflash2_drafter(ranks: int | None) -> None:
    """Ranks do not share its convolutions."""
    pair = {"draft": str(FIXTURES / "tiny-qwen3-dflash2"), "target": str(FIXTURES / "tiny-qwen3")}
    deployment = resolve(changed(**pair, gpus="b300x2", recipe="bf16", num_ranks=ranks), "x")
    assert deployment.num_ranks == 1
    with pytest.raises(ConfigError, match="expected a plain DFlash draft for 2 ranks, found layers"):
        resolve(changed(**pair, gpus="b300x2", recipe="bf16", num_ranks=2), "x")


def test_an_engine_of_other_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file does not say it, the engine that is here does."""
    draft, target = str(FIXTURES / "tiny-gpt-oss-dflash"), str(FIXTURES / "tiny-gpt-oss")
    monkeypatch.chdir(tmp_path)
    run_here("build", draft, "--target", target, "-o", "x", "--tp", 2)
    pair = {"target": target, "draft": draft, "gpus": "b300x2", "recipe": "bf16"}
    follows = resolve(changed(**pair, num_ranks=None), "x")
    assert (follows.num_ranks, follows.sources["num_ranks"]) == (2, "engine x")
    assert [f for f in found(follows) if f.rule == "engine-ranks"] == []
    (whole,) = [f for f in found(resolve(changed(**pair, num_ranks=1), "x")) if f.rule == "engine-ranks"]
    assert f"expected an engine for num_ranks 1, found {tmp_path / 'x'}, for 2" in str(whole)
    for changes, message in (
        ({"tensor_parallel_size": 4}, "a drafter shared by 4 ranks (tensor_parallel_size), or a whole one"),
        ({"enable_attention_dp": True}, "a whole drafter beside enable_attention_dp"),
    ):
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(arguments(follows) | changes))
        gpus = parse_gpus("b300x8", "gpus")
        config = file_configs(
            tmp_path / "serve.yaml", load_schema("trtllm", None), gpus=gpus, target=target, draft=None
        )[0]
        (refused,) = [f for f in check(config) if f.rule == "engine-ranks"]
        assert message in str(refused)


@pytest.mark.parametrize("sizes", [{"max_batch_size": 257}, {"max_seq_len": 131073}])
def test_what_the_plugin_does_not_take_is_refused(sizes: dict[str, int]) -> None:
    pair = {"draft": str(FIXTURES / "tiny-gpt-oss-dflash"), "target": str(FIXTURES / "tiny-gpt-oss"), "gpus": "b300x2"}
    fitting = changed(**pair, recipe="bf16", num_ranks=None)
    for file, is_refused in (fitting, False), (msgspec.structs.replace(fitting, **sizes), True):
        assert ("plugin-limits" in {f.rule for f in found(resolve(file, "x"))}) == is_refused


def test_a_dspark_draft_is_refused_in_engine_mode(tmp_path: Path) -> None:
    draft = str(write_dspark(tmp_path / "draft"))
    with pytest.raises(ConfigError, match=r"x: draft: engine mode does not support DSpark drafts"):
        resolve(FILE, "x", draft=draft)
