# SPDX-License-Identifier: Apache-2.0
"""The checker checks every choice of the writer of configurations; cache groups of vLLM, also by its own count."""

from __future__ import annotations

import copy
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.choices import CHOICES, Circumstances, chosen
from dflash_trt.deploy.cluster.cluster_server import cluster_server
from dflash_trt.deploy.cluster.dynamo_graph import dynamo_graph
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.deploy.hybrid_caches import LAYOUT, AttentionLayers, HybridCache, hybrid_caches, vllm_cache_layout
from dflash_trt.deploy.resolved_deployment import ServedModels
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.choice_rules import chat_mode, packed_weights
from dflash_trt.deploy.schema import Runtime, load_schema, runtime_keys
from dflash_trt.deploy.sizes import draft_sizes
from tests.checkpoint.compressed_samples import write_packed
from tests.checkpoint.gguf_samples import Type, write_gguf
from tests.deploy.deployments import RUNTIMES, findings, rendered, resolved
from tests.deploy.test_real_classes import needs
from tests.paths import FIXTURES

NAME = "gpt-oss-120b.h200x8.latency"
OWN = {
    "trtllm": {
        "tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp", "max_batch_size", "max_num_tokens",
        "max_seq_len", "stream_interval", "num_postprocess_workers", "kv_cache_config.dtype",
        "kv_cache_config.free_gpu_memory_fraction", "moe_config.backend", "cuda_graph_config.enable_padding",
        "speculative_config.speculative_model",
    },
    "vllm": {
        "model_tag", "host", "port", "tensor_parallel_size", "enable_expert_parallel", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "kv_cache_dtype", "enable_chunked_prefill", "stream_interval",
        "enable_auto_tool_choice", "speculative_config.model",
    },
    "sglang": {
        "model_path", "host", "port", "tp_size", "ep_size", "context_length", "max_running_requests",
        "chunked_prefill_size", "kv_cache_dtype", "stream_interval", "speculative_draft_model_path",
    },
}  # fmt: skip
"""Settings that a deployment or its user decides: others are no mistake."""


def leaves(document: dict[str, Any], outer: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= leaves(value, f"{outer}{key}.") if isinstance(value, dict) else {f"{outer}{key}": value}
    return found


def opposite(value: Any) -> Any:
    """Another value of the type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 or 1
    return [9999] if isinstance(value, list) else "other"


def found(runtime: Runtime, key: str, value: Any) -> set[str]:
    """Rules of findings about a good configuration with one other value, that the good one does not have."""
    deployment, schema = resolved(NAME), load_schema(runtime)
    good = rendered(NAME, runtime).arguments
    changed = copy.deepcopy(good)
    *outer, last = key.split(".")
    place = changed
    for each in outer:
        place = place[each]
    place[last] = value
    before, after = (check(deployment_config(deployment, schema, document)) for document in (good, changed))
    new = {(finding.rule, finding.key) for finding in after} - {(finding.rule, finding.key) for finding in before}
    return {rule for rule, _ in new}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_written_value_is_checked_or_the_users_own(runtime: Runtime) -> None:
    written = leaves(rendered(NAME, runtime).arguments)
    own = OWN[runtime] | resolved(NAME).runtime_arguments.of(runtime, NAME).keys()
    unchecked = {key for key, value in written.items() if key not in own and not found(runtime, key, opposite(value))}
    assert unchecked == set()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_choice_is_written_and_its_opposite_found(runtime: Runtime) -> None:
    written = leaves(rendered(NAME, runtime).arguments)
    circumstances = Circumstances(max_batch_size=64, decode_tokens=640)
    values = chosen(runtime, circumstances)
    assert values.items() <= written.items()
    for choice in (each for each in CHOICES[runtime] if not each.is_environment):  # the rest: below
        wanted = choice.wanted(circumstances)
        assert choice.rule in found(runtime, choice.key, opposite(wanted)), choice.key
        assert choice.why


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_written_has_no_finding_of_its_own_choices(runtime: Runtime) -> None:
    for method in ("dflash", "eagle3", "none"):
        config = deployment_config(resolved(NAME), load_schema(runtime), rendered(NAME, runtime, method).arguments)
        rules = {f.rule for f in check(config) if f.severity in (ERROR, WARNING)}
        assert rules.isdisjoint({choice.rule for choice in CHOICES[runtime]} | {"parsers"})


def test_thinking_is_off_for_a_draft_that_was_trained_without() -> None:
    """In the command, and in the findings about another one; TensorRT-LLM's server has no such default."""
    runtimes: tuple[Runtime, ...] = ("vllm", "sglang")
    for runtime in runtimes:
        arguments = dict(rendered("qwen3-8b.h200x1.latency", runtime).arguments)
        assert arguments["default_chat_template_kwargs"] == {"enable_thinking": False}
        for value, expected in (('{"enable_thinking":  false}', set()), ({"enable_thinking": True}, {"chat-mode"})):
            document = arguments | {"default_chat_template_kwargs": value}
            config = deployment_config(resolved("qwen3-8b.h200x1.latency"), load_schema(runtime), document)
            assert {finding.rule for finding in chat_mode(config)} == expected
        assert "default_chat_template_kwargs" not in rendered(NAME, runtime).arguments


def test_a_draft_that_another_quantiser_packed(tmp_path: Path) -> None:
    """vLLM loads compressed-tensors; of the others nothing is known, and none serves a GGUF file of a draft."""
    draft = Path(shutil.copytree(FIXTURES / "tiny-qwen3-dflash", tmp_path / "packed"))
    file = write_gguf(draft, tmp_path / "draft.gguf", Type.Q8_0)
    write_packed(draft)

    def packed(runtime: Runtime, name: Path) -> list[str]:
        key = runtime_keys()[runtime].draft.split(".")
        document: dict[str, Any] = {runtime_keys()[runtime].method.rpartition(".")[2]: "dflash", key[-1]: str(name)}
        nested = {key[0]: document} if len(key) > 1 else document
        config = CheckedConfig(
            schema=load_schema(runtime), document=nested, served=ServedModels(draft_sizes=draft_sizes(str(name)))
        )
        return [str(finding) for finding in packed_weights(config)]

    assert not packed("vllm", draft)
    runtimes: tuple[Runtime, ...] = ("trtllm", "sglang")
    for runtime in runtimes:
        (finding,) = packed(runtime, draft)
        assert "whether a draft in compressed-tensors pack-quantized (int4" in finding
        assert f"dflash-trt convert {draft} -o packed-bf16 --to zlab" in finding
    for runtime in (*runtimes, "vllm"):
        (finding,) = packed(runtime, file)
        assert "expected a directory of safetensors, found GGUF: " in finding


A3B, DENSE, GEMMA = "z-lab/Qwen3.6-35B-A3B-DFlash", "z-lab/Qwen3.6-27B-DFlash", "z-lab/gemma-4-31B-it-DFlash"
BLOCK = 16
"""Tokens of a page."""


@pytest.mark.parametrize(
    ("draft", "ranks", "layout"),
    [
        (A3B, 1, LAYOUT),
        (A3B, 4, None),
        (DENSE, 1, None),
        (GEMMA, 1, LAYOUT),
        (GEMMA, 16, LAYOUT),
        ("z-lab/other", 1, None),
    ],
)
def test_a_layout_helps_where_pages_have_several_sizes(draft: str, ranks: int, layout: str | None) -> None:
    """On four ranks Qwen3.6-35B-A3B keeps 1 head of 256 numbers, and its draft 2 of 128."""
    assert vllm_cache_layout(draft, ranks) == layout


@pytest.mark.parametrize(
    ("name", "said"), [("qwen3.6-35b-a3b.h200x1.latency", []), ("qwen3.6-27b.h200x1.latency", ["each of 69 layers"])]
)
def test_it_is_written_for_drafts_alone_and_checked(name: str, said: list[str], tmp_path: Path) -> None:
    text = rendered(name, "vllm").text
    assert ("env VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve" in text) == (not said)
    assert "VLLM_KV_CACHE_LAYOUT" not in rendered(name, "vllm", "none").text
    found = [f.problem for f in findings(name, "vllm") if f.rule == "cache-groups"]
    assert len(found) == len(said)
    assert all(words in problem for words, problem in zip(said, found, strict=True))
    setting = "env VLLM_KV_CACHE_LAYOUT=BLHNC "
    others = (("", not said), (f"export {setting[4:]}\n", 0), (setting.replace("BL", "LB"), not said))
    for prefix, expected in ((setting, 0), *others):
        changed = text.replace(setting, prefix)
        (tmp_path / "serve.sh").write_text(changed)
        (config,) = file_configs(tmp_path / "serve.sh", load_schema("vllm"), gpus=resolved(name).gpus)
        rules = [f.key for f in check(config) if f.rule == "cache-groups"]
        assert rules.count("VLLM_KV_CACHE_LAYOUT") == expected, changed


def test_workers_of_dynamo_have_it_too() -> None:
    """Their command is a module's, which the operator reads: no env before it."""
    name = "qwen3.6-35b-a3b.h200x1.latency"
    server = cluster_server(
        rendered(name, "vllm"), version="0.33.0", image="registry/image:1", models="/models", replicas=1
    )  # fmt: skip
    worker = yaml.safe_load(dynamo_graph(server))["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    assert {"name": "VLLM_KV_CACHE_LAYOUT", "value": LAYOUT} in worker["env"]
    assert worker["command"] == ["python3", "-m", "dynamo.vllm"]


GPT_OSS_120B = HybridCache(
    drafts=(), full=AttentionLayers(layers=18, heads=8, head_dim=64),
    sliding=AttentionLayers(layers=18, heads=8, head_dim=64), draft_sliding_layers=0, draft_full_layers=8,
)  # fmt: skip


def layers(cache: HybridCache, draft: AttentionLayers, window: int, draft_window: int) -> dict[str, Any]:
    """vLLM's specs of all layers; pages of recurrent states are as large as those of full layers."""
    kinds, torch = import_module("vllm.v1.kv_cache_interface"), import_module("torch")
    of_type = {"block_size": BLOCK, "dtype": torch.bfloat16}
    full = {"num_kv_heads": cache.full.heads, "head_size": cache.full.head_dim, **of_type}
    of_draft = {"num_kv_heads": draft.heads, "head_size": draft.head_dim, **of_type}
    page = 2 * 2 * BLOCK * cache.full.heads * cache.full.head_dim
    specs = {f"full {i}": kinds.FullAttentionSpec(**full) for i in range(cache.full.layers)}
    specs |= {
        f"linear {i}": kinds.MambaSpec(
            block_size=BLOCK, shapes=((1,),), dtypes=(torch.bfloat16,), page_size_padded=page
        )
        for i in range(cache.linear_layers)
    }
    if cache.sliding:
        sliding = {"num_kv_heads": cache.sliding.heads, "head_size": cache.sliding.head_dim, **of_type}
        specs |= {
            f"sliding {i}": kinds.SlidingWindowSpec(sliding_window=window, **sliding)
            for i in range(cache.sliding.layers)
        }
    specs |= {f"draft {i}": kinds.FullAttentionSpec(**of_draft) for i in range(cache.draft_full_layers)}
    return specs | {
        f"draft window {i}": kinds.SlidingWindowSpec(sliding_window=draft_window, **of_draft)
        for i in range(cache.draft_sliding_layers)
    }


def groups(specs: dict[str, Any], layout: str, *, is_hybrid: bool = True) -> list[Any]:
    """vLLM's own grouping."""
    planning, kinds = import_module("vllm.v1.core.kv_cache_planning"), import_module("vllm.v1.kv_cache_layout")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not is_hybrid),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: kinds.KVCacheLayout[layout]),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    return list(planning.get_kv_cache_groups(config, dict(specs)))


@pytest.mark.full
@needs("vllm")
@pytest.mark.parametrize(
    ("draft", "default", "outermost"),
    [(A3B, 46, 5), ("z-lab/Qwen3.5-27B-DFlash", 70, 70), (DENSE, 69, 69), (GEMMA, 65, 12),
     ("z-lab/gemma-4-26B-A4B-it-DFlash", 35, 11)],
)  # fmt: skip
def test_vllm_counts_as_many_groups_as_we_say(draft: str, default: int, outermost: int) -> None:
    cache = hybrid_caches()[draft]
    specs = layers(cache, cache.of_draft(draft), 1024, 2048)
    assert len(specs) == cache.layers
    counted = {layout: len(groups(specs, layout)) for layout in ("LBNHC", LAYOUT)}
    assert counted == {"LBNHC": default, LAYOUT: outermost}
    assert (vllm_cache_layout(draft, 1) is not None) == (outermost < default)


@pytest.mark.full
@needs("vllm")
def test_vllm_keeps_more_without_its_hybrid_manager() -> None:
    """Bytes of a token of a long sequence: layers of the groups that keep all of it, padded to the largest group."""
    specs = layers(GPT_OSS_120B, GPT_OSS_120B.full, 128, 128)
    hybrid, unified = groups(specs, "LBNHC"), groups(specs, "LBNHC", is_hybrid=False)
    widest = max(len(group.layer_names) for group in hybrid)
    full = sum(type(group.kv_cache_spec).__name__ == "FullAttentionSpec" for group in hybrid)
    assert len(unified) == 1
    assert len(unified[0].layer_names) / (full * widest) == pytest.approx(1.69, abs=0.01)


@pytest.mark.full
@needs("vllm")
def test_gemma_does_not_start_without_the_hybrid_manager() -> None:
    cache = hybrid_caches()[GEMMA]
    with pytest.raises(ValueError, match="same window size"):
        groups(layers(cache, cache.of_draft(GEMMA), 1024, 2048), "LBNHC", is_hybrid=False)
