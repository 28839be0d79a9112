# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, arenas and pools, against numbers worked out by hand or published."""

from __future__ import annotations

from math import prod

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_tensors import linear_shapes
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.deploy.gpus import known_gpus, parse_gpu_facts, parse_gpus
from dflash_trt.deploy.memory import GIB, arena_bytes, gpu_memory, paged_arena_bytes, request_bytes, smallest_gpus
from dflash_trt.deploy.published import PublishedDraft, published_drafts
from dflash_trt.deploy.resolved_deployment import ServingLoad
from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.sizes import DraftSizes, TargetSizes, draft_sizes, target_sizes
from dflash_trt.errors import ConfigError
from tests.paths import FIXTURES

NEWEST, OLDER, VLLM = load_schema("trtllm"), load_schema("trtllm", "1.3.0rc27"), load_schema("vllm")
SIZED = [entry for entry in published_drafts().values() if entry.size_gib is not None]


def draft(name: str = "z-lab/gpt-oss-120b-DFlash") -> DraftSizes:
    return draft_sizes(name)


def target(name: str = "openai/gpt-oss-120b") -> TargetSizes:
    return target_sizes(name)


def load(**changes: object) -> ServingLoad:
    """gpt-oss-120b on eight H200 in native mode, dense context."""
    base = ServingLoad(
        gpus=parse_gpus("h200x8", "gpus"), draft_sizes=draft(), target_sizes=target(), tensor_parallel=8, num_ranks=8,
        max_batch_size=64, max_num_tokens=16384, max_seq_len=32768, num_draft_tokens=9, draft_attention="VANILLA",
        kv_cache_fraction=0.8,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_the_context_and_unused_managers() -> None:
    """32.5 GiB of arena on eight B300 with NVFP4 plans, where half was planned."""
    halved, paged_load = load(kv_cache_dtype="fp8"), load(draft_attention="TRTLLM")
    assert arena_bytes(halved, NEWEST) == arena_bytes(load(), NEWEST)
    assert arena_bytes(halved, VLLM) == arena_bytes(load(), VLLM) // 2
    rows, whole = 32768 * 2048, request_bytes(paged_load, NEWEST)
    assert request_bytes(load(kv_cache_dtype="fp8", draft_attention="TRTLLM"), NEWEST) == (whole - rows) // 2 + rows
    # Before pull request 19410 of TensorRT-LLM; a dense arena is then replaced when that manager is
    dense, unused, paged = gpu_memory(load(), NEWEST), gpu_memory(load(), OLDER), gpu_memory(paged_load, NEWEST)
    assert "context arena" not in {item.name for item in paged.items}
    assert paged.request_bytes == unused.request_bytes
    assert dense.request_bytes == paged.request_bytes - 32768 * 2048
    assert dense.largest_fraction == 1
    assert not any(item.is_late for item in dense.items)


@pytest.mark.parametrize("entry", SIZED, ids=lambda entry: entry.draft)
def test_published_sizes_follow_from_published_facts(entry: PublishedDraft) -> None:
    """The facts and the size of a file were read in different places; norms and biases are below the last digit."""
    sizes = draft(entry.draft)
    assert sizes.weight_bytes({}, 1) / GIB == pytest.approx(entry.size_gib, abs=0.0051)


def test_targets() -> None:
    for entry in published_drafts().values():
        spec = entry.spec
        assert max(spec.target_layer_ids) < spec.num_target_layers
        assert spec.num_attention_heads % spec.num_key_value_heads == 0
        assert spec.num_layers == spec.layers > 0
    assert target().weight_bytes(1) / 1e9 == pytest.approx(65.1, abs=0.05)
    assert target("openai/gpt-oss-20b").weight_bytes(1) / 1e9 == pytest.approx(13.7, abs=0.05)
    full, windowed = 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2
    cache = target().cache
    assert cache.bytes(1000, fp8=False) == full * 1000 + windowed * 128
    assert cache.bytes(100, fp8=False, num_ranks=8) == (full + windowed) * 100 // 8
    assert cache.bytes(100, fp8=True, num_ranks=16) == (full + windowed) * 100 // 16  # a head is never split


def test_sizes_of_drafters() -> None:
    """8 layers of 92.9 M and an fc of 41.5 M parameters, as worked out from the tensors' shapes."""
    sizes, spec = draft(), draft().spec
    layer = 2 * 4096 * 2880 + 2 * 512 * 2880 + 3 * 7680 * 2880
    fc = 5 * 2880 * 2880
    assert sizes.weight_bytes({}, 1) == 2 * (8 * layer + fc)
    assert sizes.weight_bytes({}, 8) == 2 * (layer + fc)  # fc is whole on every rank
    everything = dict.fromkeys(linear_shapes(spec), "FP8")
    assert sizes.weight_bytes(everything, 1) == 8 * layer + fc
    nvfp4 = {module: "NVFP4" for module in linear_shapes(spec) if module != "fc"}
    assert sizes.weight_bytes(nvfp4, 1) == 8 * layer * 9 // 16 + 2 * fc
    assert spec.context_bytes_per_token(fp8=False) == 16384
    assert spec.context_bytes_per_token(fp8=False, num_ranks=8) == 2048
    assert spec.context_bytes_per_token(fp8=True, num_ranks=16) == 1024  # a head is never split
    sizes = draft()
    facts = {"own_embedding": True, "draft_vocab_size": 32000, "vocab_size": 201088}
    own = msgspec.structs.replace(sizes, spec=msgspec.structs.replace(sizes.spec, **facts))
    assert own.weight_bytes({}, 1) - sizes.weight_bytes({}, 1) == 2 * (201088 + 32000) * 2880
    quantised = own.weight_bytes({"lm_head": "FP8"}, 8) - sizes.weight_bytes({}, 8)
    assert quantised == (2 * 201088 + 32000) * 2880 // 8


def test_plans_and_arenas() -> None:
    memory = gpu_memory(load(), OLDER)
    items = {item.name: item.bytes for item in memory.items}
    assert items["target weights"] == target().weight_bytes(8)
    assert items["context arena"] == 65 * (32768 + 10) * 2048
    assert items["captured hidden states"] == 16384 * 5 * 2880 * 2
    assert items["arena replaced"] == items["context arena"] // 2
    late = items["arena replaced"] + items["captured by graphs"]
    assert memory.free_bytes == 143_771 * 2**20 - (sum(items.values()) - late)
    assert memory.largest_fraction == 1 - late / memory.free_bytes
    assert memory.pool_bytes == int(memory.free_bytes * 0.8)
    cache = target().cache
    assert memory.request_bytes == cache.bytes(32768, fp8=False, num_ranks=8) + 32768 * 2048
    assert memory.fits
    assert memory.unknown == ()
    memory = gpu_memory(load(target_sizes=None), NEWEST)
    assert "target weights" not in {item.name for item in memory.items}
    assert memory.full_requests is None
    assert memory.unknown[0].startswith("target weights and cache:")
    # test_dflash_config_budget.py: 2 x 129 x 5 x (4096 + 5) x 8 x 128 x 2 B, about 10.09 GiB
    spec = msgspec.structs.replace(draft().spec, layers=5, num_key_value_heads=8, head_dim=128, block_size=16)
    asked = load(
        draft_sizes=msgspec.structs.replace(draft(), spec=spec), num_ranks=1, max_batch_size=128, max_seq_len=4096,
        num_draft_tokens=4,
    )  # fmt: skip
    assert arena_bytes(asked, NEWEST) == 2 * 129 * 5 * (4096 + 5) * 8 * 128 * 2
    paged = msgspec.structs.replace(spec, layers=2, num_key_value_heads=1, head_dim=16, block_size=8)
    asked = load(
        draft_sizes=msgspec.structs.replace(draft(), spec=paged), num_ranks=1, max_batch_size=1, max_seq_len=100,
        num_draft_tokens=7,
    )  # fmt: skip
    assert paged_arena_bytes(asked, NEWEST) == 2 * 2 * 2 * 128 * 1 * 16 * 2


def test_what_ranks_divide() -> None:
    native, engine = gpu_memory(load(), NEWEST), gpu_memory(load(num_ranks=1), NEWEST)
    native_items, engine_items = ({i.name: i.bytes for i in memory.items} for memory in (native, engine))
    assert engine_items["context arena"] == 8 * native_items["context arena"]
    assert engine_items["drafter weights"] == draft().weight_bytes({}, 1)
    assert engine_items["target weights"] == native_items["target weights"]
    shared, own = load(tensor_parallel=2, num_ranks=2, draft_attention="TRTLLM"), target()
    apart = msgspec.structs.replace(shared, enable_attention_dp=True, num_ranks=1)
    items = {item.name: item.bytes for item in gpu_memory(apart, NEWEST).items}
    assert items["target weights"] == own.expert_bytes // 2 + own.dense_bytes
    assert request_bytes(apart, NEWEST) == 2 * (request_bytes(shared, NEWEST) or 0)


@pytest.mark.parametrize(("batch", "graphs"), [(1, 1), (3, 3), (64, 11), (100, 16), (128, 19), (256, 21), (300, 22)])
def test_taps_are_captured_once_more_for_every_cuda_graph(batch: int, graphs: int) -> None:
    """1, 2, 4, 8, 16, ... 128, 192, ... and the largest: 12 buffers for a batch of 64, 22 for one of 256."""
    items = {item.name: item for item in gpu_memory(load(max_batch_size=batch), OLDER).items}
    assert items["captured by graphs"].bytes == graphs * items["captured hidden states"].bytes
    assert items["captured by graphs"].is_late
    assert not items["captured hidden states"].is_late


@pytest.mark.parametrize(
    ("version", "late"), [("1.3.0rc27", {"arena replaced", "captured by graphs"}), ("1.4.0rc1", set())]
)
def test_what_is_allocated_beside_the_pool_depends_on_the_release(version: str, late: set[str]) -> None:
    memory = gpu_memory(load(), load_schema("trtllm", version))
    assert {item.name for item in memory.items if item.is_late} == late


@pytest.mark.parametrize("attention", ["VANILLA", "TRTLLM"])
def test_the_largest_that_fits_fits_and_one_more_does_not(attention: str) -> None:
    asked = load(max_batch_size=4000, max_seq_len=131072, draft_attention=attention, gpus=parse_gpus("h100x8", "gpus"))
    memory = gpu_memory(asked, NEWEST)
    for field, largest in (("max_batch_size", memory.largest_batch), ("max_seq_len", memory.largest_context)):
        if largest == 0:
            continue
        assert gpu_memory(msgspec.structs.replace(asked, **{field: largest}), NEWEST).fits
        if largest < 2**16:
            assert not gpu_memory(msgspec.structs.replace(asked, **{field: largest + 1}), NEWEST).fits
    if attention == "VANILLA":
        assert not memory.fits
        assert 0 < memory.largest_batch < 4000


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3"])
def test_checkpoints_that_are_here(name: str) -> None:
    sizes = draft(str(FIXTURES / f"{name}-dflash"))
    checkpoint = read_draft(FIXTURES / f"{name}-dflash")
    assert sizes.origin == "checkpoint"
    assert sizes.spec == checkpoint.spec
    assert sizes.weight_bytes({}, 1) == sum(2 * prod(shape) for shape in linear_shapes(checkpoint.spec).values())
    here = target(str(FIXTURES / name))
    size = sum(tensor.num_bytes for tensor in read_weights(FIXTURES / name).values())
    assert here.expert_bytes + here.dense_bytes == size
    assert (here.expert_bytes > 0) == (name == "tiny-gpt-oss")
    assert here.origin == "checkpoint"
    assert (here.cache.num_sliding_layers > 0) == (name == "tiny-gpt-oss")
    assert here.cache.num_full_layers + here.cache.num_sliding_layers == here.spec.num_hidden_layers


@pytest.mark.parametrize("text", ["b3OOx8", "b300", "x8", "b300x0", "b300x08", "b300x8 ", f"b300x{'9' * 5001}"])
def test_gpus_that_are_not_known(text: str) -> None:
    with pytest.raises(ConfigError, match="mine: gpus: expected a GPU"):
        parse_gpus(text, "mine: gpus")


def test_gpus() -> None:
    assert str(parse_gpus("rtxpro6000x4", "gpus")) == "rtxpro6000x4"
    assert str(parse_gpus("B300x8", "gpus")) == str(parse_gpus("8xb300", "gpus")) == "b300x8"
    for whole, nodes in (("b300x64", 8), ("gb200x4", 1), ("gb200x8", 2), ("gb10x2", 2), ("a100-40gbx8", 1)):
        assert (parse_gpus(whole, "gpus").nodes, str(parse_gpus(whole, "gpus"))) == (nodes, whole)
    with pytest.raises(ConfigError, match=r"at most 8 GPUs \(one node\), or whole nodes up to 64, found 'b300x12'"):
        parse_gpus("b300x12", "gpus")
    with pytest.raises(ConfigError, match=r"at most 4 GPUs \(one node\), or whole nodes up to 32, found 'gb200x6'"):
        parse_gpus("gb200x6", "gpus")
    with pytest.raises(ConfigError, match=r"nearest GPU: b300"):
        parse_gpus("b330x8", "gpus")


def test_hopper_and_ampere_lack_formats() -> None:
    """FP8 came with SM 8.9 and FP4 with SM 10.0: NVIDIA's CUDA programming guide, compute capabilities."""
    for gpu in known_gpus().values():
        assert (gpu.fp8_flops > 0) == (gpu.compute_capability >= (8, 9)), gpu.name
        assert (gpu.fp4_flops > 0) == (gpu.compute_capability >= (10, 0)), gpu.name
        assert gpu.bf16_flops <= (gpu.fp8_flops or gpu.bf16_flops) <= (gpu.fp4_flops or 2e16)
        assert gpu.memory_bandwidth > 0
        assert gpu.link_bandwidth > 0 or gpu.gpus_per_node == 1


def test_gpus_that_their_owner_describes() -> None:
    facts = parse_gpu_facts("memory=16,bandwidth=896,sm=12.0,bf16=123.5", "--gpu-facts")
    gpu = parse_gpus("rtx5070tix2", "--gpus", facts).gpu
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("rtx5070ti", 16 * 10**9, (12, 0))
    assert (gpu.memory_bandwidth, gpu.bf16_flops, gpu.fp8_flops) == (896e9, 123.5e12, 0)
    for text, words in (
        ("memory=16", "missing required field `sm`"), ("memory=a,sm=8", "Expected `float`"), ("", "found ''"),
        ("memory=16,sm=12,vram=3", "found 'vram'"), ("memory=0,sm=9", "> 0"), ("memory=16,sm=2.0", ">= 7.5"),
        ("memory=inf,sm=9", "<= 1000000"), ("memory=16,sm=inf", "< 100"), ("memory=16,sm=9,bf16=1e9", "<= 1000000"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--gpu-facts: expected .*{words}"):
            parse_gpu_facts(text, "--gpu-facts")


@pytest.mark.parametrize(
    ("gpus", "name", "expected"),
    [
        ("rtx5090x1", "openai/gpt-oss-120b", "rtx5090x4"),
        ("l4x1", "openai/gpt-oss-120b", "l4x8"),
        ("gb10x1", "Qwen/Qwen3-Coder-Next", "gb10x2"),
        ("h100x1", "moonshotai/Kimi-K2.5", "h100x16"),
        ("l4x1", "zai-org/GLM-5.3", None),
    ],
)
def test_the_fewest_gpus_that_are_enough(gpus: str, name: str, expected: str | None) -> None:
    """Each smaller number that divides the heads is refused by the same account."""
    one = load(gpus=parse_gpus(gpus, "gpus"), target_sizes=target(name), tensor_parallel=1, num_ranks=1)
    found = smallest_gpus(one, VLLM)
    assert (found and str(found)) == expected
    for count in (1, 2, 4, 8, 16, 32, 64):
        if found is None or count < found.count:
            assert not gpu_memory(msgspec.structs.replace(one, tensor_parallel=count, num_ranks=count), VLLM).fits
