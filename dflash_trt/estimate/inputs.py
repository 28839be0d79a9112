# SPDX-License-Identifier: Apache-2.0
"""The cost model's inputs from deployments, checkpoints and published facts: the only module here that knows them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.deploy.gpus import known_gpus
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.sizes import BF16_BITS, WEIGHT_BITS, DraftSizes, draft_sizes
from dflash_trt.errors import ConfigError
from dflash_trt.estimate.constants import DATA, constants
from dflash_trt.estimate.shapes import DraftShape, System, TargetShape
from dflash_trt.files.json_file import read_json
from dflash_trt.files.read import is_directory
from dflash_trt.files.strict_yaml import closest

MXFP4_BITS = 4.25
STORED_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
MAX_EAGLE3_DRAFTS = 5
RUNTIMES = ("trtllm", "vllm", "sglang")


class _Targets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    targets: tuple[TargetShape, ...]


@cache
def known_targets() -> dict[str, TargetShape]:
    """By repository id."""
    known = read_json(DATA / "targets.json", _Targets, ConfigError, what="the package's data")
    return {entry.target: entry for entry in known.targets}


def target_shape(name: str) -> TargetShape:
    """A target by directory or repository id; raises ConfigError, with the list, for one that is not known."""
    if is_directory(name):
        return _read_target(Path(name))
    known = known_targets()
    if name not in known:
        raise ConfigError(
            f"estimate: expected a target whose layers are known ({', '.join(sorted(known))}), or a directory, found"
            f" {name!r}{closest(name, known, 'target')}",
            hint="give its directory with --target; a config.json is all that is read of it",
        )
    return known[name]


def _read_target(directory: Path) -> TargetShape:
    facts = Facts.load(directory / "config.json")
    if "text_config" in facts:
        facts = facts.section("text_config")
    layers = facts.integer("num_hidden_layers")
    types = facts.texts("layer_types") if "layer_types" in facts else ("full_attention",) * layers
    if set(types) - {"full_attention", "sliding_attention"}:
        raise facts.error("layer_types", "full_attention or sliding_attention; other layers are not modelled")
    heads, hidden = facts.integer("num_attention_heads"), facts.integer("hidden_size")
    experts = next((facts.integer(key) for key in ("num_local_experts", "num_experts") if key in facts), 0)
    is_gpt_oss = "num_local_experts" in facts
    width = facts.integer("intermediate_size") if is_gpt_oss or not experts else facts.integer("moe_intermediate_size")
    dtype = next((facts.text(key) for key in ("dtype", "torch_dtype") if key in facts), "bfloat16")
    bits = STORED_BITS.get(dtype, BF16_BITS)
    return TargetShape(
        target=str(directory),
        num_layers=layers,
        num_full_layers=types.count("full_attention"),
        sliding_window=facts.integer("sliding_window") if "sliding_attention" in types else 0,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=facts.integer("num_key_value_heads"),
        head_dim=facts.integer("head_dim") if "head_dim" in facts else hidden // heads,
        vocab_size=facts.integer("vocab_size"),
        intermediate_size=0 if experts else width,
        num_experts=experts,
        top_k=facts.integer("num_experts_per_tok") if experts else 0,
        expert_intermediate_size=width if experts else 0,
        expert_bits=MXFP4_BITS if "quantization_config" in facts and is_gpt_oss else bits,
        weight_bits=bits,
        head_bits=bits,
    )


def system(deployment: ResolvedDeployment, runtime: str, target_directory: str | None = None) -> System:
    """The system that a resolved deployment makes of a runtime; `target_directory` stands in for its target.

    Raises ConfigError for a target without known layers, and for one that the draft was not made for.
    """
    target = target_shape(target_directory or deployment.target)
    taps = deployment.draft_sizes.spec.target_layer_ids
    layers = deployment.draft_sizes.spec.num_target_layers
    if layers not in (None, target.num_layers) or max(taps) >= target.num_layers:
        raise ConfigError(
            f"{target.target}: expected a target of {layers or f'more than {max(taps)}'} layers, as"
            f" {deployment.draft_sizes.name} was made for, found {target.num_layers}"
        )
    gpus = deployment.gpus
    is_engine = deployment.mode == "engine"
    return System(
        target=target,
        draft=_draft_shape(deployment.draft_sizes, deployment.algorithms, runs_whole_block=is_engine),
        eagle3=eagle3_shape(target),
        gpu=gpus.name,
        gpu_memory_bytes=gpus.gpu.memory_bytes,
        num_gpus=gpus.count,
        tensor_parallel=deployment.tensor_parallel,
        expert_parallel=deployment.expert_parallel,
        drafter_ranks=1 if is_engine else deployment.tensor_parallel,
        runtime=runtime,
        kv_bytes=1 if deployment.kv_cache_dtype == "fp8" else 2,
        max_batch_size=deployment.max_batch_size,
        max_seq_len=deployment.max_seq_len,
        max_num_tokens=deployment.max_num_tokens,
        pool_fraction=deployment.kv_cache_fraction,
        is_arena_dense=runtime == "trtllm" and deployment.draft_attention == "VANILLA",
    )


def draft_shape(name: str, algorithm: str = "") -> DraftShape:
    """A draft by directory or repository id, every linear layer but fc quantised by `algorithm`."""
    sizes = draft_sizes(name)
    if sizes is None:
        known = sorted(published_drafts())
        raise ConfigError(f"estimate: expected a draft whose facts are published ({', '.join(known)}), found {name!r}")
    modules = [module for module in sizes.spec.linear_shapes() if module != "fc"]
    return _draft_shape(sizes, dict.fromkeys(modules, algorithm), runs_whole_block=False)


def _draft_shape(sizes: DraftSizes, algorithms: dict[str, str], *, runs_whole_block: bool) -> DraftShape:
    def bits(modules: list[str]) -> float:
        params = {module: shapes[module][0] * shapes[module][1] for module in modules}
        total = sum(size * WEIGHT_BITS.get(algorithms.get(module, ""), BF16_BITS) for module, size in params.items())
        return float(total / sum(params.values()))

    spec = sizes.spec
    shapes = spec.linear_shapes()
    return DraftShape(
        name=sizes.name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        num_taps=len(spec.target_layer_ids),
        max_draft_tokens=spec.block_size - 1,
        layer_bits=bits([module for module in shapes if module != "fc"]),
        fc_bits=bits(["fc"]),
        runs_whole_block=runs_whole_block,
    )


def eagle3_shape(target: TargetShape) -> DraftShape:
    """An EAGLE-3 drafter for a target: one layer of the target's head shapes, three taps; the rest is assumed."""
    assumed = constants().eagle3
    return DraftShape(
        name="EAGLE-3 (assumed shape)",
        num_layers=1,
        hidden_size=target.hidden_size,
        intermediate_size=round(assumed["eagle3_intermediate_ratio"].value * target.hidden_size),
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        num_taps=3,
        max_draft_tokens=MAX_EAGLE3_DRAFTS,
        head_rows=min(target.vocab_size, round(assumed["eagle3_head_rows"].value)),
        is_chain=True,
    )


def gpu_memory_bytes(gpu: str) -> int:
    """Of a GPU that deployments name; raises KeyError for others."""
    return known_gpus()[gpu].memory_bytes
