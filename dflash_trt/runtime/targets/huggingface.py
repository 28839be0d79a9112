# SPDX-License-Identifier: Apache-2.0
"""The target on Hugging Face transformers: any causal language model that returns hidden states.

Models whose attention and state are known here run as one packed pass over all requests (`PackedTarget`), others one
request after the other with transformers' own caches (`SequentialTarget`).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    __version__,
)

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights, read_headers
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.target_checkpoint import EMBEDDINGS, TargetSpec
from dflash_trt.checkpoint.tokenizer import refusing
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.device.fused import why_not_compiled
from dflash_trt.device.launcher import CudaLauncher
from dflash_trt.errors import CheckpointError, EngineError
from dflash_trt.files.read import read_text
from dflash_trt.runtime.targets.compiled_layers import compile_layers
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, Acceleration, PackedTarget
from dflash_trt.runtime.targets.runnable import check_architecture, target_dtype
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.sequential_target import SequentialTarget

PACKED_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Tensors of gpt-oss's MXFP4 experts: two 4-bit codes a byte, which transformers unpacks, and their scales."""
HEAD = "lm_head.weight"
EXPERTS, SECOND_MATRICES = ".experts.", ("down_proj", ".w2.")
CGROUP = Path("/sys/fs/cgroup")


def check_memory(
    directory: Path, weights: Mapping[str, StoredTensor], dtype: torch.dtype, num_ranks: int = 1, device: str = "cpu"
) -> None:
    """Raises CheckpointError where a rank's share of the weights, as `dtype`, is more than `device` has free memory."""
    free = free_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    needed = loaded_bytes(weights, dtype) // num_ranks
    if free is not None and needed > free:
        bits, where = 8 * dtype.itemsize, "" if device == "cpu" else "GPU "
        half = "--dtype bfloat16 halves them; " if bits == 32 else ""
        raise CheckpointError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free {where}memory for its weights, which are computed"
            f" with as {bits}-bit numbers, found {free / 1e9:.1f} GB",
            hint=f"{half}take a machine with more memory or share it among more ranks (--tp); on GPUs,"
            " TensorRT-LLM, vLLM and SGLang serve it from a deployment: dflash-trt serve-config --list",
        )


def placement(
    directory: Path, weights: Mapping[str, StoredTensor], dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Options of from_pretrained that spread the weights, as `dtype`, over all GPUs; none where `device` holds them.

    Raises CheckpointError where all GPUs together have no room.
    """
    needed, free = loaded_bytes(weights, dtype), torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return {}
    everywhere = sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    if needed > everywhere:
        half = "--dtype bfloat16 halves them; " if dtype.itemsize == 4 else ""
        raise CheckpointError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free GPU memory for its weights as"
            f" {8 * dtype.itemsize}-bit numbers, found {everywhere / 1e9:.1f} GB on {torch.cuda.device_count()} GPUs",
            hint=f"{half}take more GPUs, or give --device cpu",
        )
    return {"device_map": "auto"}


def loaded_bytes(weights: Mapping[str, StoredTensor], dtype: torch.dtype) -> int:
    """Peak bytes of the target while each weight is converted to `dtype` and laid out."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in weights.items()}
    packed = {name for name, tensor in weights.items() if name.endswith(PACKED_SUFFIX) and tensor.dtype == "U8"}
    scales = {name.removesuffix(PACKED_SUFFIX) + SCALES_SUFFIX for name in packed}
    counts = {name: 0 if name in scales else size * (2 if name in packed else 1) for name, size in sizes.items()}
    copies = _experts_copy(counts) + (_head_copy(sizes) if dtype.itemsize == 4 else 0)
    return dtype.itemsize * (sum(counts.values()) + copies)


def _head_copy(sizes: Mapping[str, int]) -> int:
    """Values of the embeddings where they are the head, too: `cpu/linear_layers` lays them out beside themselves."""
    if any(name.endswith(HEAD) for name in sizes):
        return 0
    return max((size for name, size in sizes.items() if name.endswith(EMBEDDINGS)), default=0)


def _experts_copy(counts: Mapping[str, int]) -> int:
    """Values of the first matrices of a layer's experts: `cpu/linear_layers` lays them out before it lets them go."""
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if EXPERTS in name and not any(second in name for second in SECOND_MATRICES):
            layers[name.partition(EXPERTS)[0]] += count
    return max(layers.values(), default=0)


def free_bytes() -> int | None:
    """Free bytes of this machine, or of the container if less; None where the system does not say."""
    lines = [line.split() for line in _lines(Path("/proc/meminfo"))]
    limits = [1024 * int(size) for name, size, *_ in lines if name == "MemAvailable:"]
    return min(limits if (room := cgroup_room()) is None else [*limits, room], default=None)


def cgroup_room() -> int | None:
    """Bytes below the limit of this process's cgroup (v2); the page cache is evicted on demand and does not count."""
    folder = _own_cgroup()
    limit = next(iter(_lines(folder / "memory.max")), "max")
    if not limit.isdigit():
        return None
    used = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return max(0, int(limit) - int(used.get("anon", "0")))


def _own_cgroup() -> Path:
    own = next((line.split("::", 1)[1] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    return CGROUP / own.lstrip("/")


def _lines(file: Path) -> list[str]:
    """Lines of a kernel file; none where it is missing."""
    try:
        return read_text(file, EngineError, limit=2**20).splitlines()
    except EngineError:
        return []


LOG = logging.getLogger("dflash_trt.runtime.targets")
PACKED_MODEL_TYPES = {
    *("deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "laguna", "llama", "minimax_m2"),
    *("mistral", "mixtral", "olmo3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
}
"""tests/targets compares each with transformers' own attention. A list, because a model does not tell all that its
attention needs: diffllama's second softmax, or doge's mask, would be left out without a word."""
GENERATION_CONFIG = "generation_config.json"
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""One longer request in a pass would turn the positions of all the others."""


def load_model(
    directory: Path,
    spec: TargetSpec,
    target_layer_ids: Sequence[int],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    num_ranks: int = 1,
    **load_options: Any,
) -> PreTrainedModel:
    """Loads safetensors weights onto `device` as `target_dtype` says; code that a checkpoint brings along is never run.

    One that is larger than the GPU `device` is spread over all GPUs, layer by layer. Raises what `target_dtype` and
    `placement` raise; CheckpointError for a tap on the last layer, missing weights, a damaged
    generation_config.json, no room on GPUs, or none for the share of one of `num_ranks` ranks, whose `load_options` say
    how it is cut. Only then are a repository's weights fetched.
    """
    if spec.num_hidden_layers - 1 in target_layer_ids:
        raise CheckpointError(
            f"target_layer_ids: expected layers below {spec.num_hidden_layers - 1}, found the last"
            " layer, whose output transformers returns only after the final norm"
        )
    if (directory / GENERATION_CONFIG).is_file():
        Facts.load(directory / GENERATION_CONFIG)
    headers = read_headers(directory)
    weights = read_weights(directory) if headers is None else headers
    torch_dtype = target_dtype(dtype, directory, weights, device)
    is_sharded = num_ranks > 1
    spread = {} if device == "cpu" or is_sharded else placement(directory, weights, torch_dtype, device)
    if not spread:  # onto a GPU, a whole target goes by way of the CPU, and a shard at once
        check_memory(directory, weights, torch_dtype, num_ranks, device if is_sharded else "cpu")
    fetch_weights(directory)
    options = {"dtype": torch_dtype, "use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # to refuse them in our words
    check_architecture(directory)
    model: PreTrainedModel
    with refusing(directory, f"a causal language model that transformers {__version__} loads"):
        config = _dequantised(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
        options |= {"config": config} | load_options | spread
        model, loaded = _auto_class(config).from_pretrained(directory, **options)
    _check_weights(directory, loaded)
    if spread:
        _check_places(directory, model)
    model = text_model(model, directory).eval()
    return model if device == "cpu" or spread or is_sharded else model.to(device)


def _dequantised(config: Any) -> Any:
    """The configuration, changed so that weights come as numbers everywhere.

    With a GPU and the package `kernels` transformers would keep MXFP4 and FP8 codes, for kernels that it fetches.
    """
    for part in (config, config.get_text_config()):
        stored = getattr(part, "quantization_config", None) or {}
        if stored.get("quant_method") in ("mxfp4", "fp8"):
            stored["dequantize"] = True
    return config


def _auto_class(config: Any) -> Any:
    """The one that knows the model: Kimi K2.5's text is only there below its images."""
    is_multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_multimodal and not is_text else AutoModelForCausalLM


def _check_weights(directory: Path, loaded: dict[str, Any]) -> None:
    """`loaded` is what transformers (5.23) says of the tensors; those that it did not find or take are random."""
    hint = "download or copy the checkpoint again"
    if missing := sorted(loaded["missing_keys"]):
        raise CheckpointError(f"{directory}: expected a tensor for {missing[0]}, found none", hint=hint)
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{directory}: {name}: expected shape {list(expected)} (config.json), found {list(found)}", hint=hint
        )


def _check_places(directory: Path, model: PreTrainedModel) -> None:
    """Where GPUs have no room, accelerate goes on to the CPU and the disk, without a word."""
    if {weight.device.type for weight in model.parameters()} != {"cuda"}:
        raise CheckpointError(
            f"{directory}: expected room for all layers on {torch.cuda.device_count()} GPUs, found some left over for"
            " the CPU",
            hint="take more GPUs, or give --device cpu",
        )


def text_model(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """`model` itself, or transformers' text-only class around its language model and lm_head; the rest is dropped.

    A multimodal model asks for more on the way: Gemma 4's for the kinds of its tokens, Kimi K2.5's for images. Where
    transformers has no text-only class, the whole model runs. CheckpointError where that class holds weights that the
    model does not.
    """
    config = model.config.get_text_config()
    if config is model.config:
        return model
    inner = getattr(model.base_model, "language_model", None)
    if inner is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return model
    with torch.device("meta"):
        text: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    setattr(text, text.base_model_prefix, inner)
    text.set_output_embeddings(model.get_output_embeddings())
    if missing := [name for name, tensor in text.named_parameters() if tensor.is_meta]:
        raise CheckpointError(
            f"{directory}: model_type: expected a model with all of a {config.model_type}, found"
            f" {model.config.model_type} without {missing[0]}"
        )
    text.generation_config = model.generation_config
    text.name_or_path = model.name_or_path
    return text


def make_target(
    model: PreTrainedModel,
    target_layer_ids: Sequence[int],
    num_slots: int,
    accelerate: Callable[[PreTrainedModel], Acceleration] | None = None,
    *,
    tap_hidden_size: int | None = None,
) -> HuggingFaceTarget:
    """The fastest target that runs `model` for `num_slots` sequences and returns the taps `target_layer_ids`.

    `accelerate` replaces layers of a packed one; `tap_hidden_size` is as for `HuggingFaceTarget`.
    """
    name = model.name_or_path
    if (num_devices := len(set(getattr(model, "hf_device_map", {}).values()))) > 1:
        LOG.warning(
            "%s: requests run one after the other, on %d devices in turn; ranks (--tp) use all at once",
            name,
            num_devices,
        )
        return SequentialTarget(model, target_layer_ids, num_slots, tap_hidden_size)
    copy_mapped_weights(model)
    if not can_pack(model):
        LOG.warning(
            "%s: requests run one after the other, with transformers' own caches: no packed pass is known for %s",
            name,
            model.config.model_type,
        )
        return SequentialTarget(model, target_layer_ids, num_slots, tap_hidden_size)
    acceleration, launcher = accelerate(model) if accelerate else TORCH_OPERATORS, None
    if model.device.type == "cuda":
        if lacking := why_not_compiled():
            LOG.warning("%s: torch.compile lacks %s: passes have more kernels, so they take longer", name, lacking)
        compile_layers(model)
        launcher = CudaLauncher(model.device)
    return PackedTarget(model, target_layer_ids, num_slots, acceleration, launcher)


def copy_mapped_weights(model: PreTrainedModel) -> None:
    """Copies weights that are still pages of the checkpoint's files, which others may overwrite or truncate."""
    if not (maps := Path("/proc/self/maps")).is_file():  # macOS
        return
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    files = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].strip().startswith("/")]
    mapped = sorted((int(begin, 16), int(end, 16)) for begin, end in files)
    for weight in (*model.parameters(), *model.buffers()):
        index = bisect(mapped, (weight.data_ptr(), math.inf)) - 1
        if weight.device.type == "cpu" and index >= 0 and weight.data_ptr() < mapped[index][1]:
            weight.data = weight.data.clone()


def can_pack(model: PreTrainedModel) -> bool:
    """Whether `slot_attention` is known to do all that the model's own attention does."""
    ropes = getattr(model.config, "rope_parameters", None) or {}  # one, or one for each type of layer
    rope_types = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    looks_ahead = getattr(model.config, "use_bidirectional_attention", None) not in (None, False, "vision")  # Gemma
    return model.config.model_type in PACKED_MODEL_TYPES and not rope_types & LENGTH_DEPENDENT_ROPE and not looks_ahead


def stop_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end-of-sequence tokens of generation_config.json, else config.json; CheckpointError for anything else."""
    eos_token_id = model.generation_config.eos_token_id
    ids = [] if eos_token_id is None else eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"{GENERATION_CONFIG}: eos_token_id: expected a token id or a list of them, found {eos_token_id!r}"
        )
    return frozenset(ids)
