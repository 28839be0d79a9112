# SPDX-License-Identifier: Apache-2.0
"""Reads a draft checkpoint: its facts, and the tensors they demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import FP8, Quantization, Shape, expected_tensors, read_quantization, read_scale
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

MODEL_TYPES = ("qwen3", "gpt_oss")
ARCHITECTURE = "DFlashDraftModel"
# Both keep the order of logits, and proposals are the argmax: read as numbers > 0, and without effect.
ORDER_KEEPING_KEYS = ("final_logit_softcapping", "output_multiplier")
DFLASH_CONFIG_KEYS = {
    "block_size", "causal", "input_embedding_scale", "is_causal", "mask_token_id", "swa_window_size",
    "target_layer_ids", "use_swa", *ORDER_KEEPING_KEYS,
}  # fmt: skip
# Far beyond any draft: a slip in config.json is refused before it fills the memory (layers, rotary tables).
MAX_LAYERS, MAX_BLOCK_SIZE, MAX_POSITIONS = 1024, 1024, 2**24


class DraftCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A draft checkpoint whose facts and tensors agree."""

    directory: Path
    spec: DraftSpec
    config: Facts
    """config.json, as it was read."""
    quantization: Quantization
    weights: dict[str, Tensor]

    def scaled_alike(self, modules: Sequence[str]) -> bool:
        """Whether linear layers are all dense, or quantised by one algorithm with one common global scale."""
        algorithms = {self.quantization.modules.get(module) for module in modules}
        if len(algorithms) > 1:
            return False
        algorithm = algorithms.pop()
        if algorithm is None:
            return True
        scale = "weight_scale" if algorithm == FP8 else "weight_scale_2"
        return len({read_scale(self.weights[f"{module}.{scale}"]) for module in modules}) == 1

    def cache_scales(self, kv: str) -> tuple[float, ...]:
        """By layer: what a stored K (`kv` = "k") or V ("v") of an FP8 cache is multiplied with; 1 for BF16."""
        if not self.quantization.fp8_kv_cache:
            return (1.0,) * len(self.spec.layers)
        names = [f"{layer}.{kv}_proj.{kv}_scale" for layer in self.spec.attention_modules()]
        return tuple(read_scale(self.weights[name]) for name in names)

    @property
    def config_file(self) -> Path:
        """config.json."""
        return self.config.file


def is_draft(config: Facts) -> bool:
    """Whether config.json is that of a DFlash draft, of a supported dialect or not."""
    is_ours = "architectures" in config and ARCHITECTURE in config.texts("architectures")
    return is_ours or "dflash_config" in config or "speculators_model_type" in config


def read_draft(directory: Path, config: Facts | None = None) -> DraftCheckpoint:
    """Reads and checks a DFlash draft checkpoint; `config` is its config.json where that has been read already.

    Raises CheckpointError when a fact is missing or contradictory, the dialect is not supported, or a tensor
    is missing, unused, or of another shape or dtype than the facts demand.
    """
    config = config or Facts.load(directory / "config.json")
    spec = _read_spec(config)
    if strays := sorted(path.name for path in directory.glob("*.pt")):
        raise CheckpointError(
            f"{directory}: expected all tensors in safetensors files, found {', '.join(strays)} (pickle)"
        )
    weights = read_weights(directory)
    quantization = read_quantization(config, spec.linear_modules(), spec.attention_modules(), weights)
    expected = expected_tensors(spec.tensor_shapes(), quantization, spec.attention_modules())
    _check_tensors(directory, expected, weights)
    return DraftCheckpoint(directory=directory, spec=spec, config=config, quantization=quantization, weights=weights)


def _read_spec(config: Facts) -> DraftSpec:
    _check_dialect(config)
    dflash = config.section("dflash_config")
    if unknown := sorted(dflash.keys() - DFLASH_CONFIG_KEYS):
        raise dflash.error(unknown[0], f"only the keys {', '.join(sorted(DFLASH_CONFIG_KEYS))}")
    for key in ORDER_KEEPING_KEYS:
        _either(config, dflash, key).number(key, default=1)
    spec = DraftSpec(
        model_type=config.text("model_type", choices=MODEL_TYPES),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_attention_heads=config.integer("num_attention_heads"),
        num_key_value_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", minimum=2),
        layers=_read_layers(config, dflash),
        attention_bias=config.flag("attention_bias"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=read_rope(config),
        max_position_embeddings=config.integer("max_position_embeddings", maximum=MAX_POSITIONS),
        vocab_size=config.integer("vocab_size"),
        block_size=_either(config, dflash, "block_size").integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=_either(config, dflash, "mask_token_id").integer("mask_token_id", minimum=0),
        target_layer_ids=_either(config, dflash, "target_layer_ids").integers("target_layer_ids"),
        num_target_layers=config.optional("num_target_layers", config.integer),
        input_embedding_scale=_either(config, dflash, "input_embedding_scale").number(
            "input_embedding_scale", default=1
        ),
    )
    _check_spec(config, dflash, spec)
    return spec


def _check_dialect(config: Facts) -> None:
    if "speculators_model_type" in config:
        raise config.error(
            "speculators_model_type",
            "a z-lab or modelopt DFlash checkpoint (speculators count taps and vocabulary differently)",
        )
    if ARCHITECTURE not in config.texts("architectures"):
        raise config.error("architectures", f"[{ARCHITECTURE!r}]")
    config.text("hidden_act", choices=("silu",))


def _check_spec(config: Facts, dflash: Facts, spec: DraftSpec) -> None:
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {spec.num_attention_heads}")
    if spec.head_dim % 2:
        raise config.error("head_dim", "an even number (rotary pairs)")
    if spec.mask_token_id >= spec.vocab_size:
        raise _either(config, dflash, "mask_token_id").error(
            "mask_token_id", f"a token id below vocab_size {spec.vocab_size}"
        )
    if len(set(spec.target_layer_ids)) < len(spec.target_layer_ids):
        raise _either(config, dflash, "target_layer_ids").error("target_layer_ids", "each layer once")
    if list(spec.target_layer_ids) != sorted(spec.target_layer_ids):  # runtimes feed fc in the order of the layers
        raise _either(config, dflash, "target_layer_ids").error(
            "target_layer_ids", "layers in rising order, and fc.weight's columns in the same"
        )


def _either(config: Facts, dflash: Facts, key: str) -> Facts:
    """Where `key` stands: dflash_config (newer files) or the top level (older files); never two values."""
    if not dflash.agrees(config, key):
        raise config.error(key, f"the same value as in dflash_config.{key}")
    return dflash if key in dflash else config


def _read_layers(config: Facts, dflash: Facts) -> tuple[DraftLayer, ...]:
    """Window and causality by layer.

    z-lab's rule: is_causal, else dflash_config.causal (modelopt, JetSpec), else sliding layers are causal and
    full ones are not (dflash/model.py, August 2026). modelopt spells windows use_swa + swa_window_size.
    """
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if "layer_types" not in config and config.flag("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "layer_types, which say where the window applies")
    types = config.texts("layer_types") if "layer_types" in config else ("full_attention",) * num_layers
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise config.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    windows = [config.integer("sliding_window") if t == "sliding_attention" else None for t in types]
    if dflash.flag("use_swa", default=False):
        windows = [dflash.integer("swa_window_size")] * num_layers

    causal: bool | None = None
    if "is_causal" in (place := _either(config, dflash, "is_causal")):
        causal = place.flag("is_causal")
    elif "causal" in dflash:
        causal = dflash.flag("causal")
    return tuple(
        DraftLayer(sliding_window=window, causal=window is not None if causal is None else causal) for window in windows
    )


def _check_tensors(
    directory: Path, expected: dict[str, tuple[tuple[str, ...], Shape]], weights: dict[str, Tensor]
) -> None:
    if missing := sorted(expected.keys() - weights.keys()):
        _, shape = expected[missing[0]]
        raise CheckpointError(
            f"{directory}: expected tensor {missing[0]!r} {list(shape)}, found no such tensor"
            f" ({len(missing)} of {len(expected)} missing)"
        )
    if unused := sorted(weights.keys() - expected.keys()):
        raise CheckpointError(
            f"{weights[unused[0]].file}: expected the {len(expected)} tensors that config.json describes, found"
            f" tensor {unused[0]!r} besides ({len(unused)} that nothing would use)"
        )
    for name, (dtypes, shape) in expected.items():
        tensor = weights[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r}: expected shape {list(shape)}, found {list(tensor.shape)}"
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r}: expected dtype {' or '.join(dtypes)}, found {tensor.dtype}"
            )
