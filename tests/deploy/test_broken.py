# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations, each with the message that it must get."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.checker import check, deployment_config, file_config
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.render import command_text
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.deploy.deployments import rendered, resolved
from tests.paths import FIXTURES

REMOVED = object()
SPEC = "speculative_config"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a good configuration, and what must be said about it."""

    rule: str
    key: str
    words: str
    runtime: Runtime = "trtllm"
    change: dict[str, Any] = {}
    """By dotted path."""
    gpus: str = "h200x8"
    version: str | None = None
    severity: str = ERROR
    also: tuple[str, ...] = ()
    """Other rules that refuse the same change."""


CASES = {
    "unknown key": Case(
        rule="unknown-key", key="max_batch_siz", change={"max_batch_siz": 8}, words="write max_batch_size"
    ),
    "unknown key like no other": Case(
        rule="unknown-key", key="zzz", change={"zzz": 8}, words="remove it", severity=WARNING
    ),
    "unknown key like no other, keys of that release": Case(
        rule="unknown-key", key="zzz", change={"zzz": 8}, words="remove it", version="1.3.0rc27"
    ),
    "unknown nested key": Case(
        rule="unknown-key", key=f"{SPEC}.block_size", change={f"{SPEC}.block_size": 10}, words="DFlashDecodingConfig"
    ),
    "key of another release": Case(
        rule="unknown-key", key=f"{SPEC}.context_recompute_tail", change={f"{SPEC}.context_recompute_tail": 64},
        words="tensorrt_llm 1.3.0rc27", version="1.3.0rc27",
    ),
    "wrong type": Case(
        rule="wrong-type", key="tensor_parallel_size", change={"tensor_parallel_size": "eight"},
        words="expected an integer, found 'eight'",
    ),
    "wrong nested type": Case(
        rule="wrong-type", key="kv_cache_config.enable_block_reuse", change={"kv_cache_config.enable_block_reuse": 2},
        words="expected true or false, found 2",
    ),
    "a word for a number": Case(
        rule="coerced", key="tensor_parallel_size", change={"tensor_parallel_size": "8"}, severity=WARNING,
        words="expected 8, found '8', which the runtime reads as 8; write 8",
    ),
    "a word for a number, read before the rules": Case(
        rule="parallelism", key="tensor_parallel_size", change={"tensor_parallel_size": "16"}, words="found 16 ranks",
    ),
    "a number for a flag": Case(
        rule="coerced", key="kv_cache_config.enable_block_reuse", severity=WARNING,
        change={"kv_cache_config.enable_block_reuse": 0}, words="reads as false; write false",
    ),
    "nothing drafted": Case(
        rule="out-of-range", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 0}, words="more than 0",
    ),
    "a method in capitals": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "DFLASH"},
        words="write DFlash",
    ),
    "a sampling mode in capitals": Case(
        rule="unknown-value", key=f"{SPEC}.advanced_sampling_mode", change={f"{SPEC}.advanced_sampling_mode": "FULL"},
        words="write full",
    ),
    "no share of the memory": Case(
        rule="wrong-type", key="kv_cache_config.free_gpu_memory_fraction", words="expected a number, found None",
        change={"kv_cache_config.free_gpu_memory_fraction": None},
    ),
    "no windows": Case(
        rule="out-of-range", key="kv_cache_config.max_attention_window", words="at least 1 of them, found none",
        change={"kv_cache_config.max_attention_window": []},
    ),
    "a window without an end": Case(
        rule="out-of-range", key="kv_cache_config.max_attention_window[0]", words="expected more than 0, found -1",
        change={"kv_cache_config.max_attention_window": [-1]},
    ),
    "a disk cache nowhere": Case(
        rule="disk-cache", key="kv_cache_config.disk_cache_path", change={"kv_cache_config.disk_cache_size": 1024},
        words="a directory for 1024 bytes",
    ),
    "unknown graphs": Case(
        rule="unknown-value", key="cuda_graph_config.mode", change={"cuda_graph_config.mode": "zzz"}, words="decode",
    ),
    "unknown weights": Case(
        rule="unknown-value", key="load_format", change={"load_format": "zzz"}, words="AUTO, DUMMY",
    ),
    "a negative length": Case(
        rule="out-of-range", key="max_seq_len", change={"max_seq_len": -1}, words="at least 0, found -1",
    ),
    "an argument that is dropped": Case(
        rule="removed-key", key="sampler_type", change={"sampler_type": "TorchSampler"}, severity=WARNING,
        words="remove it",
    ),
    "attention of a later release": Case(
        rule="unknown-value", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "AUTO"},
        words="which came later (main @ 414ba69f", severity=WARNING,
    ),
    "a number for a mapping": Case(rule="wrong-type", key="moe_config", change={"moe_config": 3}, words="a mapping"),
    "a flag for a number": Case(
        rule="coerced", key="max_batch_size", change={"max_batch_size": True}, words="reads as 1; write 1",
        severity=WARNING,
    ),
    "wrong list item": Case(
        rule="wrong-type", key=f"{SPEC}.target_layer_ids[1]", change={f"{SPEC}.target_layer_ids": [1, "nine"]},
        words="expected an integer, found 'nine'", also=("draft-facts",),
    ),
    "out of range": Case(
        rule="out-of-range", key="kv_cache_config.free_gpu_memory_fraction",
        change={"kv_cache_config.free_gpu_memory_fraction": 1.5}, words="expected at most 1, found 1.5",
    ),
    "not above a bound": Case(
        rule="out-of-range", key="stream_interval", change={"stream_interval": 0}, words="expected more than 0, found 0"
    ),
    "unknown word": Case(
        rule="unknown-value", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "VANILA"},
        words="write VANILLA",
    ),
    "unknown method": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "DFlsh"},
        words="write DFlash",
    ),
    "a method that the schema may not know": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "Zzz"},
        words="check its keys by hand", severity=WARNING,
    ),
    "no word for a method": Case(
        rule="wrong-type", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": None},
        words="expected a string, found None",
    ),
    "a number that is none of the choices": Case(
        runtime="sglang", rule="unknown-value", key="log_requests_level", change={"log_requests_level": 7},
        words="expected one of 0, 1, 2, 3, found 7; choose one of them",
    ),
    "no number": Case(
        rule="wrong-type", key="kv_cache_config.free_gpu_memory_fraction", words="expected a number, found nan",
        change={"kv_cache_config.free_gpu_memory_fraction": float("nan")},
    ),
    "a whole number with a point": Case(
        rule="coerced", key="max_num_tokens", change={"max_num_tokens": 16384.0}, words="write 16384", severity=WARNING,
    ),
    "a fraction for a number": Case(
        rule="wrong-type", key="max_num_tokens", change={"max_num_tokens": 16384.5}, words="an integer or null",
    ),
    "the keys of the method": Case(
        rule="unknown-key", key=f"{SPEC}.max_draft_lenn", change={f"{SPEC}.max_draft_lenn": 1}, words="max_draft_len",
    ),
    "no method": Case(
        rule="missing-key", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": REMOVED},
        words="found no such key",
    ),
    "no draft": Case(
        rule="missing-key", key=f"{SPEC}.speculative_model", change={f"{SPEC}.speculative_model": REMOVED},
        words="the draft checkpoint",
    ),
    "no draft length": Case(
        rule="missing-key", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": REMOVED}, words="K, the"
    ),
    "draft longer than the block": Case(
        rule="draft-length", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 10},
        words="expected at most 9 (block_size 10 of z-lab/gpt-oss-120b-DFlash",
    ),
    "draft shorter than the block": Case(
        rule="draft-length", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 8}, words="found 8",
        severity=WARNING,
    ),
    "token budget": Case(
        rule="token-budget", key="max_num_tokens", change={"max_num_tokens": 639},
        words="64 * 10 = 640, found 639; raise it to 640 or set max_batch_size to 63",
    ),
    "token budget below one request": Case(
        rule="token-budget", key="max_num_tokens", change={"max_num_tokens": 9}, words="found 9; raise it to 640 [",
    ),
    "token budget, batch left to the runtime": Case(
        rule="token-budget", key="max_num_tokens", change={"max_batch_size": REMOVED}, words="2048 * 10 = 20480",
        severity=WARNING, also=("context-arena",),
    ),
    "no length": Case(rule="max-seq-len", key="max_seq_len", change={"max_seq_len": REMOVED}, words="add max_seq_len"),
    "TRTLLM attention on Hopper": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "TRTLLM"},
        words="expected SM 10.0 or SM 10.3 for TRTLLM, found h200 (SM 9.0); set it to VANILLA",
    ),
    "TRTLLM attention on a workstation GPU": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "TRTLLM"},
        gpus="rtxpro6000x8", words="rtxpro6000 (SM 12.0)",
    ),
    "FA4 attention on Blackwell": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "FA4"},
        gpus="b300x8", words="expected SM 9.0 for FA4, found b300 (SM 10.3)",
    ),
    "prefix reuse": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse",
        change={"kv_cache_config.enable_block_reuse": True}, words="starves the drafter, found true;",
    ),
    "prefix reuse by default": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse",
        change={"kv_cache_config.enable_block_reuse": REMOVED}, words="found true (its default);",
    ),
    "prefix reuse without a remedy": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse", version="1.3.0rc27",
        change={"kv_cache_config.enable_block_reuse": True},
        words="set kv_cache_config.enable_block_reuse to false [prefix-reuse]",
    ),
    "prefix reuse from a pool that may be shared": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse", gpus="b300x8", severity=WARNING,
        change={"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"}, words="starves",
    ),
    "context arena": Case(
        rule="context-arena", key="max_batch_size", change={"max_seq_len": 131072, "max_batch_size": 1024,
        "cuda_graph_config.max_batch_size": 64}, words="what is left of each h200 (131.3 GiB), found 256.3 GiB",
    ),
    "cache pool": Case(
        rule="memory", key="max_batch_size",
        change={"kv_cache_config.free_gpu_memory_fraction": 0.001}, words="a cache pool for one request of 32768",
    ),
    "a pool that leaves no room behind it": Case(
        rule="pool-fraction", key="kv_cache_config.free_gpu_memory_fraction", severity=WARNING,
        change={"kv_cache_config.free_gpu_memory_fraction": 0.97},
        words="beside the pool (arena replaced and captured by graphs), found",
    ),
    "a GPU too small for anything": Case(
        rule="memory", key="max_batch_size", gpus="h100x1",
        change={"tensor_parallel_size": 1, f"{SPEC}.attention_backend": "TRTLLM", "max_num_tokens": 1000000},
        words="use more or larger GPUs: no batch fits", also=("draft-attention",),
    ),
    "a private arena that would not fit": Case(
        rule="context-arena", key="max_batch_size", gpus="b300x8", severity=WARNING,
        change={f"{SPEC}.attention_backend": "TRTLLM", "max_seq_len": 131072, "max_batch_size": 1024,
                "cuda_graph_config.max_batch_size": 64},
        words="should the drafter not get the managed pool",
    ),
    "more ranks than GPUs": Case(
        rule="parallelism", key="tensor_parallel_size", gpus="h200x4", change={},
        words="at most the 4 GPUs of h200x4, found 8 ranks; set it to 4",
    ),
    "experts that do not divide": Case(
        rule="parallelism", key="moe_expert_parallel_size", change={"moe_expert_parallel_size": 3},
        words="a divisor of tensor_parallel_size 8, found 3",
    ),
    "experts on one rank": Case(
        rule="parallelism", key="moe_expert_parallel_size",
        change={"moe_expert_parallel_size": 3, "tensor_parallel_size": 1}, words="found 3; set it to 1 [",
    ),
    "experts that do not multiply up": Case(
        rule="parallelism", key="moe_tensor_parallel_size",
        change={"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}, words="expected 4",
    ),
    "graphs against their list": Case(
        rule="cuda-graphs", key="cuda_graph_config.max_batch_size",
        change={"cuda_graph_config.batch_sizes": [1, 2, 32]}, words="expected 32, the largest of batch_sizes, found 64",
    ),
    "graphs for batches that never run": Case(
        rule="cuda-graphs", key="cuda_graph_config.max_batch_size",
        change={"cuda_graph_config.max_batch_size": 128}, words="at most max_batch_size 64", severity=WARNING,
    ),
    "another tap than the draft's": Case(
        rule="draft-facts", key=f"{SPEC}.target_layer_ids", change={f"{SPEC}.target_layer_ids": [2, 10, 18, 26, 34]},
        words="expected [1, 9, 17, 25, 33] (as in z-lab/gpt-oss-120b-DFlash)",
    ),
    "taps of a draft that is not here yet": Case(
        rule="taps", key=f"{SPEC}.target_layer_ids", change={f"{SPEC}.target_layer_ids": REMOVED}, severity=WARNING,
        words="expected [1, 9, 17, 25, 33]: where they are not known before the download",
    ),
    "a mask token that is not published": Case(
        rule="draft-facts", key=f"{SPEC}.mask_token_id", severity=UNCHECKED, words="not published for z-lab/gpt-oss",
    ),
    "published backbone": Case(
        rule="backbone", key="z-lab/gpt-oss-120b-DFlash/config.json: model_type", words="has not been seen",
        severity=WARNING,
    ),
    "vllm: sliding and full layers": Case(
        runtime="vllm", rule="hybrid-cache", key="disable_hybrid_kv_cache_manager", severity=WARNING,
        words="vLLM 0.32.0 and 0.33.0 ended on a CPU with 'All drafting layers should belong to the same kv cache",
    ),
    "vllm: unknown key": Case(
        runtime="vllm", rule="unknown-key", key="max_num_seq", change={"max_num_seq": 3}, words="write max_num_seqs"
    ),
    "vllm: unknown speculative key": Case(
        runtime="vllm", rule="unknown-key", key=f"{SPEC}.num_speculative_token",
        change={f"{SPEC}.num_speculative_token": 3}, words="write num_speculative_tokens",
    ),
    "vllm: draft longer than the block": Case(
        runtime="vllm", rule="draft-length", key=f"{SPEC}.num_speculative_tokens",
        change={f"{SPEC}.num_speculative_tokens": 10}, words="expected at most 9",
    ),
    "vllm: token budget": Case(
        runtime="vllm", rule="token-budget", key="max_num_batched_tokens", change={"max_num_batched_tokens": 512},
        words="max_num_seqs * (1 + K) = 64 * 10 = 640, found 512",
    ),
    "vllm: no draft": Case(
        runtime="vllm", rule="missing-key", key=f"{SPEC}.model", change={f"{SPEC}.model": REMOVED}, words="dflash"
    ),
    "vllm: a draft on some ranks": Case(
        runtime="vllm", rule="parallelism", key=f"{SPEC}.draft_tensor_parallel_size",
        change={f"{SPEC}.draft_tensor_parallel_size": 2}, words="1 or tensor_parallel_size 8, found 2",
    ),
    "vllm: a key that is only refused": Case(
        runtime="vllm", rule="renamed-key", key=f"{SPEC}.tensor_parallel_size",
        change={f"{SPEC}.tensor_parallel_size": 8}, words="write draft_tensor_parallel_size",
    ),
    "vllm: more ranks than GPUs": Case(
        runtime="vllm", rule="parallelism", key="tensor_parallel_size", change={"data_parallel_size": 2},
        words="found 16 ranks; set it to 4",
    ),
    "vllm: memory": Case(
        runtime="vllm", rule="memory", key="max_num_seqs", change={"max_model_len": 131072 * 64}, gpus="h100x8",
        words="lower to max_model_len",
    ),
    "sglang: two windows": Case(
        runtime="sglang", rule="verify-window", key="speculative_dflash_block_size",
        change={"speculative_dflash_block_size": 8}, words="expected 10, as speculative_num_draft_tokens, found 8",
    ),
    "sglang: window longer than the block": Case(
        runtime="sglang", rule="draft-length", key="speculative_num_draft_tokens",
        change={"speculative_num_draft_tokens": 11}, words="expected at most 10 (block_size 10",
    ),
    "sglang: no draft": Case(
        runtime="sglang", rule="missing-key", key="speculative_draft_model_path",
        change={"speculative_draft_model_path": REMOVED}, words="the draft of DFLASH",
    ),
    "sglang: pipeline": Case(
        runtime="sglang", rule="parallelism", key="pp_size", change={"pp_size": 2}, words="expected 1 with DFLASH"
    ),
    "sglang: head under data parallelism": Case(
        runtime="sglang", rule="dp-attention", key="enable_dp_lm_head", change={"attn_dp_size": 2}, words="true with"
    ),
    "sglang: window smaller than the block": Case(
        runtime="sglang", rule="draft-window", key="speculative_draft_window_size",
        change={"speculative_draft_window_size": 4}, words="at least the verify window 10",
    ),
    "sglang: sinks without a window": Case(
        runtime="sglang", rule="draft-window", key="speculative_draft_sink_size",
        change={"speculative_draft_sink_size": 4}, words="expected speculative_draft_window_size",
    ),
    "sglang: requests left to it": Case(
        runtime="sglang", rule="running-requests", key="max_running_requests",
        change={"max_running_requests": REMOVED}, words="SGLang takes 48", severity=WARNING,
    ),
}  # fmt: skip


def changed(runtime: Runtime, change: dict[str, Any]) -> dict[str, Any]:
    """A good configuration with some keys set or removed."""
    document = copy.deepcopy(rendered("gpt-oss-120b.h200x8.latency", runtime).arguments)
    for path, value in change.items():
        *outer, last = path.split(".")
        place = document
        for key in outer:
            place = place[key]
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    return document


def checked(tmp_path: Path, document: dict[str, Any], case: Case, draft: str | None = None) -> list[Finding]:
    """What a check finds in that configuration as a file, a command line for vLLM and SGLang."""
    schema = load_schema(case.runtime, case.version)
    file = tmp_path / "config"
    is_trtllm = case.runtime == "trtllm"
    file.write_text(yaml.safe_dump(document) if is_trtllm else command_text(case.runtime, document))
    gpus = parse_gpus(case.gpus, "--gpus")
    return check(file_config(file, schema, gpus=gpus, target="openai/gpt-oss-120b", draft=draft))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_broken(tmp_path: Path, case: Case) -> None:
    found = checked(tmp_path, changed(case.runtime, case.change), case)
    matching = [f for f in found if (f.rule, f.key) == (case.rule, case.key)]
    assert len(matching) == 1, "\n".join(map(str, found))
    line = str(matching[0])
    assert case.words in line
    assert matching[0].severity == case.severity
    assert "\n" not in line
    assert matching[0].fix
    assert {f.rule for f in found if f.severity == ERROR} - {case.rule} == set(case.also)


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
def test_the_good_configuration_is_good(tmp_path: Path, runtime: Runtime) -> None:
    found = checked(tmp_path, changed(runtime, {}), Case(runtime=runtime, rule="", key="", words=""))
    assert {f.rule for f in found} <= {"backbone", "draft-facts", "hybrid-cache"}
    assert ERROR not in {f.severity for f in found}


def test_at_least_twenty_and_every_rule() -> None:
    assert len(CASES) >= 20


def test_an_empty_name_is_no_directory(tmp_path: Path) -> None:
    """Path("") is the working directory."""
    found = checked(tmp_path, changed("trtllm", {f"{SPEC}.speculative_model": ""}), Case(rule="", key="", words=""))
    assert ("draft-length", UNCHECKED) in {(f.rule, f.severity) for f in found}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    document = changed("trtllm", {"zz_typo_free": 1, "max_batch_siz": 1, "stream_interval": 0, "max_seq_len": "x"})
    found = checked(tmp_path, document, Case(rule="", key="", words=""))
    assert {"zz_typo_free", "max_batch_siz", "stream_interval", "max_seq_len"} <= {f.key for f in found}


def test_problems_come_in_the_order_of_the_document_and_one_at_a_time() -> None:
    """Whatever order the schema has; a word of the wrong type is not also none of the choices."""
    spec = {"attention_backend": 3, "decoding_type": "DFlash", "max_draft_lenn": 1, "max_draft_len": -1}
    document = {"stream_interval": 0, "zz": 1, SPEC: spec, "max_batch_size": "x", "backend": 1}
    found = [(f.key, f.rule) for f in check_schema(load_schema("trtllm", None), document)]
    assert found == [
        ("stream_interval", "out-of-range"), ("zz", "unknown-key"), (f"{SPEC}.attention_backend", "wrong-type"),
        (f"{SPEC}.max_draft_lenn", "unknown-key"), (f"{SPEC}.max_draft_len", "out-of-range"),
        ("max_batch_size", "wrong-type"), ("backend", "wrong-type"),
    ]  # fmt: skip


def write_draft(tmp_path: Path, **config: object) -> Path:
    """The fixture draft with some keys of its config.json changed."""
    directory = tmp_path / "draft"
    shutil.copytree(FIXTURES / "tiny-gpt-oss-dflash", directory)
    values = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_native_backbone_of_a_checkpoint(tmp_path: Path) -> None:
    """gpt_oss leads to layers without qkv_proj; qwen3 to a dense backbone, whatever DFlash architecture is named."""
    case = Case(rule="", key="", words="")
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    gpt_oss = checked(tmp_path, document, case, draft=str(FIXTURES / "tiny-gpt-oss-dflash"))
    (finding,) = [f for f in gpt_oss if f.rule == "backbone"]
    assert finding.severity == ERROR
    assert "found 'gpt_oss'; write qwen3 there and keep attention_bias" in str(finding)
    quantize_checkpoint(read_draft(FIXTURES / "tiny-gpt-oss-dflash"), load_recipe("bf16"), tmp_path / "bf16")
    for draft in (write_draft(tmp_path, model_type="qwen3"), tmp_path / "bf16"):
        assert [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "backbone"] == []


def test_engine_mode_needs_a_release_that_it_knows() -> None:
    deployment = resolved("gpt-oss-120b.b300x8.nvfp4")
    schema = load_schema("trtllm", None)
    later = msgspec.structs.replace(schema, rules={k: v for k, v in schema.rules.items() if k != "engine_mode"})
    document = rendered("gpt-oss-120b.b300x8.nvfp4", "trtllm").arguments
    assert not any(f.rule == "engine-mode" for f in check(deployment_config(deployment, schema, document)))
    (finding,) = [f for f in check(deployment_config(deployment, later, document)) if f.rule == "engine-mode"]
    assert finding.severity == ERROR
    assert "found tensorrt_llm 1.4.0rc1; serve the draft checkpoint in native mode" in str(finding)


def test_facts_of_a_checkpoint(tmp_path: Path) -> None:
    draft = write_draft(tmp_path, model_type="qwen3")
    mask = json.loads((draft / "config.json").read_text())["dflash_config"]["mask_token_id"]
    case = Case(rule="", key="", words="")
    taps = json.loads((draft / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    good = {f"{SPEC}.max_draft_len": 7, f"{SPEC}.mask_token_id": mask, f"{SPEC}.target_layer_ids": taps}
    document = changed("trtllm", {**good, f"{SPEC}.mask_token_id": mask + 1})
    found = checked(tmp_path, document, case, draft=str(draft))
    assert any(f.rule == "draft-facts" and f"expected {mask}" in f.problem for f in found)
    document = changed("trtllm", good)
    assert not [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "draft-facts"]


@pytest.mark.parametrize(("recipe", "is_refused"), [("nvfp4", True), ("nvfp4-native", False)])
def test_quantised_projections_in_native_mode(tmp_path: Path, recipe: str, is_refused: bool) -> None:
    from tests.cli.commands import run_here

    draft = tmp_path / "quantised"
    run_here("quantize", FIXTURES / "tiny-qwen3-dflash", "-o", draft, "--recipe", recipe)
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    found = checked(tmp_path, document, Case(rule="", key="", words=""), draft=str(draft))
    refusals = [str(f) for f in found if f.rule == "quantized-context"]
    assert bool(refusals) == is_refused
    if is_refused:
        assert "found layers.0.self_attn.q_proj and" in refusals[0]
        assert "in NVFP4; quantise with --recipe nvfp4-native, or serve in engine mode" in refusals[0]
    vllm = Case(runtime="vllm", rule="", key="", words="")
    document = changed("vllm", {f"{SPEC}.num_speculative_tokens": 7})
    warned = [f for f in checked(tmp_path, document, vllm, draft=str(draft)) if f.rule == "quantized-context"]
    assert [f.severity for f in warned] == ([WARNING] if is_refused else [])


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(changed("trtllm", {f"{SPEC}.speculative_model": "someone/draft"})))
    found = check(file_config(file, load_schema("trtllm", None), gpus=None, target=None, draft=None))
    assert {f.rule for f in found if f.severity == UNCHECKED} == {"draft-length", "memory"}
    document = changed("trtllm", {f"{SPEC}.attention_backend": "TRTLLM"})
    file.write_text(yaml.safe_dump(document))
    found = check(file_config(file, load_schema("trtllm", None), gpus=None, target=None, draft=None))
    assert "draft-attention" in {f.rule for f in found if f.severity == UNCHECKED}
