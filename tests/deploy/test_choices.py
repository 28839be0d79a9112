# SPDX-License-Identifier: Apache-2.0
"""Whatever the writer of configurations chooses, the checker checks: each written value, with its opposite in place."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.choices import CHOICES, Circumstances, chosen
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.choice_rules import METHOD_KEYS, packed_weights
from dflash_trt.deploy.schema import Runtime, load_schema, runtime_keys
from dflash_trt.deploy.sizes import draft_sizes
from tests.checkpoint.compressed_samples import write_packed
from tests.checkpoint.gguf_samples import Type, write_gguf
from tests.deploy.deployments import RUNTIMES, rendered, resolved
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
    own = OWN[runtime] | resolved(NAME).runtime_arguments.of(runtime, "dflash", NAME).keys()
    unchecked = {key for key, value in written.items() if key not in own and not found(runtime, key, opposite(value))}
    assert unchecked == set()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_choice_is_written_and_its_opposite_found(runtime: Runtime) -> None:
    written = leaves(rendered(NAME, runtime).arguments)
    circumstances = Circumstances(max_batch_size=64, decode_tokens=640)
    values = chosen(runtime, circumstances)
    assert values.items() <= written.items()
    for choice in (each for each in CHOICES[runtime] if not each.is_environment):  # those: test_cache_groups.py
        wanted = choice.wanted(circumstances)
        assert choice.rule in found(runtime, choice.key, opposite(wanted)), choice.key
        assert choice.why


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_written_has_no_finding_of_its_own_choices(runtime: Runtime) -> None:
    for method in ("dflash", "eagle3", "none"):
        config = deployment_config(resolved(NAME), load_schema(runtime), rendered(NAME, runtime, method).arguments)
        rules = {f.rule for f in check(config) if f.severity in (ERROR, WARNING)}
        assert rules.isdisjoint({choice.rule for choice in CHOICES[runtime]} | {"parsers"})


def test_a_draft_that_another_quantiser_packed(tmp_path: Path) -> None:
    """vLLM loads compressed-tensors; of the others nothing is known, and none serves a GGUF file of a draft."""
    draft = Path(shutil.copytree(FIXTURES / "tiny-qwen3-dflash", tmp_path / "packed"))
    file = write_gguf(draft, tmp_path / "draft.gguf", Type.Q8_0)
    write_packed(draft)

    def packed(runtime: Runtime, name: Path) -> list[str]:
        key = runtime_keys()[runtime].draft.split(".")
        document: dict[str, Any] = {METHOD_KEYS[runtime].rpartition(".")[2]: "dflash", key[-1]: str(name)}
        nested = {key[0]: document} if len(key) > 1 else document
        config = CheckedConfig(
            schema=load_schema(runtime), document=nested, gpus=None, draft=draft_sizes(str(name)), target=None,
            algorithms={}, mode="native",
        )  # fmt: skip
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
