# SPDX-License-Identifier: Apache-2.0
"""Reads a draft checkpoint: its facts, and the tensors that these require."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects import mimo, own
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.gguf import describe as describe_gguf
from dflash_trt.checkpoint.dialects.keys import check_restated
from dflash_trt.checkpoint.dialects.recognise import is_draft, read_config, recognise
from dflash_trt.checkpoint.dialects.refused import refuse_stranger, refuse_target
from dflash_trt.checkpoint.draft_spec import HEAD, DraftSpec
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.foreign_quantisers import refuse_foreign, refuse_foreign_tensors, refuse_uncalibrated
from dflash_trt.checkpoint.number_formats import FORMATS
from dflash_trt.checkpoint.own_vocabulary import head_token_ids
from dflash_trt.checkpoint.quantization import (
    Quantization,
    check_claims,
    expected_tensors,
    read_claims,
    read_quantization,
    read_scale,
)
from dflash_trt.checkpoint.read_packed import read_packed
from dflash_trt.checkpoint.safetensors_file import StoredTensor, check_tensors
from dflash_trt.checkpoint.tidy_names import refuse_plain_model, tidied
from dflash_trt.errors import CheckpointError

TORCH_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
TRAINING_STATE = re.compile("optim|(lr_?)?sched|train|rng_|random_states|scaler|sampler|dataloader|global_step")
"""Beginnings of the names of pickles with which training resumes."""


class DraftCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A draft checkpoint whose facts and tensors agree."""

    directory: Path
    spec: DraftSpec
    config: Facts
    """The unmodified config.json."""
    quantization: Quantization
    weights: dict[str, StoredTensor]
    """Tensors by canonical name."""
    dialect: Dialect
    """Dialect that the checkpoint is written in."""
    stored_as: str | None = None
    """Format and scheme, in words, of a GGUF file or of packed weights that are read as BF16."""
    prefix: str = ""
    """Prefix that all tensors have in the file, and none in `weights`."""

    def scaled_alike(self, modules: Sequence[str]) -> bool:
        """Whether linear layers are all dense, or all quantised by one algorithm with the same global scale."""
        algorithms = {self.quantization.modules.get(module) for module in modules}
        if len(algorithms) > 1:
            return False
        algorithm = algorithms.pop()
        if algorithm is None or (scale := FORMATS[algorithm].tensor_scale) is None:
            return True
        return len({read_scale(self.weights[f"{module}.{scale}"]) for module in modules}) == 1

    def cache_scales(self, kv: str) -> tuple[float, ...]:
        """Factor by layer of a stored K (`kv` = "k") or V ("v") in an FP8 cache; 1 in a BF16 cache."""
        if not self.quantization.fp8_kv_cache:
            return (1.0,) * len(self.spec.layers)
        names = [f"{layer}.{kv}_proj.{kv}_scale" for layer in self.spec.attention_modules()]
        return tuple(read_scale(self.weights[name]) for name in names)

    def canonical_config(self) -> dict[str, object]:
        """config.json in the layout of the canonical names of `weights`; unchanged if it is in that layout."""
        return self.config.values() if self.dialect.is_canonical else own.to_config(self.spec, self.torch_dtype())

    def torch_dtype(self) -> str:
        """torch's name of the most frequent type among dense tensors."""
        return torch_dtype(self.weights[name].dtype for name in sorted(self.weights))


def torch_dtype(dtypes: Iterable[str]) -> str:
    """torch's name of the most frequent dense type among `dtypes`; of several, the first."""
    counts = Counter(dtype for dtype in dtypes if dtype in TORCH_TYPES)
    return TORCH_TYPES[counts.most_common(1)[0][0]] if counts else "bfloat16"


def read_spec(config: Facts, weights: dict[str, StoredTensor]) -> DraftSpec:
    """The facts of a draft from its config.json and its tensors, which have the names of its dialect.

    Raises CheckpointError also for an unread key that may change what a draft computes.
    """
    dialect = recognise(config)
    spec = dialect.read(config, weights)
    check_restated(config, spec)
    dialect.refuse_unread(config)
    return spec


def read_draft(directory: Path, config: Facts | None = None) -> DraftCheckpoint:
    """Reads and checks a draft, a directory or a GGUF file; `config` is the result of `read_config`, if it was read.

    Raises CheckpointError for facts that are missing, contradictory or not supported, and tensors that do not fit them.
    """
    config = as_checkpoint(config or read_config(directory))
    refuse_stranger(config)
    if not is_draft(config):
        refuse_target(config)
    dialect = recognise(config)
    claims = [] if config.file == directory else read_claims(config)
    refuse_foreign(config, claims)
    _refuse_pickles(directory)
    stored, prefix = tidied(dialect.load(directory))
    refuse_plain_model(directory, stored)
    stored, stored_as, config = read_packed(config, stored)
    refuse_foreign_tensors(stored)
    has_claims = stored_as is None and config.file != directory
    if config.file == directory:
        stored_as = describe_gguf(stored)
    spec = read_spec(config, stored)
    weights = dialect.canonical(stored, spec)
    modules = [*spec.linear_modules(), *([HEAD] if spec.has_own_head else [])]
    quantization = read_quantization(modules, spec.attention_modules(), weights)
    if has_claims:
        refuse_uncalibrated(claims, quantization)
        check_claims(config, claims, quantization)
    expected = expected_tensors(tensor_shapes(spec), quantization, spec.attention_modules())
    check_tensors(directory, expected, weights, described_by=config.file.name)
    head_token_ids(spec, weights)
    return DraftCheckpoint(
        directory=directory, spec=spec, config=config, quantization=quantization, weights=weights, dialect=dialect,
        stored_as=stored_as, prefix=prefix,
    )  # fmt: skip


def refuse_quantised(draft: DraftCheckpoint) -> None:
    """Raises CheckpointError for a draft with quantised layers or an FP8 context cache."""
    if draft.quantization.algorithms():
        found = ", ".join(sorted({*draft.quantization.modules.values()})) or "an FP8 context cache"
        raise CheckpointError(
            f"{draft.directory}: expected an unquantised draft, found {found}",
            hint="give the checkpoint that it was made from",
        )


def _refuse_pickles(directory: Path) -> None:
    """Raises CheckpointError for a pickle without a safetensors file of the same name; training state is ignored."""
    pickles = (path for path in directory.glob("*.pt") if not TRAINING_STATE.match(path.name))
    strays = sorted(path for path in pickles if not path.with_suffix(".safetensors").is_file())
    if strays:
        raise CheckpointError(
            f"{directory}: expected all tensors in safetensors files, found"
            f" {', '.join(path.name for path in strays)} (pickle)",
            hint=mimo.CONVERSION if strays[0].name == mimo.PICKLED_MASK else None,
        )


REPLACED = "dflash_trt_checkpoint"
"""Key of an engine's config.json with the values that `for_pool` replaced."""


def for_pool(config: dict[str, object], num_layers: int) -> dict[str, object]:
    """config.json of an engine: `config` with one BF16 pool for all layers, which TensorRT-LLM allocates.

    With different windows TensorRT-LLM would allocate several pools; with one window for all it would recycle pages
    that the worker still reads; without a window it would inherit the target's
    (`_create_one_model_draft_kv_cache_manager` of pyexecutor/_util.py @ 12a71fe4). The graphs contain the windows, and
    readers of the draft find them at REPLACED.
    """
    pool = {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * num_layers,
        "torch_dtype": "bfloat16",
    }
    return config | pool | {REPLACED: {key: config[key] for key in pool if key in config}}


def as_checkpoint(config: Facts) -> Facts:
    """The draft's own facts, from the config.json of a checkpoint or of an engine directory."""
    if REPLACED not in config:
        return Facts(config.values(), config.file)  # with nothing read so far
    kept = {key: value for key, value in config.values().items() if key not in for_pool({}, 0)}
    return Facts(kept | config.section(REPLACED).values(), config.file)
