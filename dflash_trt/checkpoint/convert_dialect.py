# SPDX-License-Identifier: Apache-2.0
"""Writes a draft checkpoint in another dialect: the same facts and bytes under other keys and names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor
from dflash_trt.checkpoint.dialects.layouts import Layout, name_verifier
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.modelopt_config import Json, claim
from dflash_trt.checkpoint.own_vocabulary import T2D, head_token_ids
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG
from dflash_trt.checkpoint.safetensors_writer import PRODUCER, PRODUCER_KEY, SafetensorsWriter, aligned, is_ours
from dflash_trt.checkpoint.weights import INDEX, PICKLE_SUFFIXES, SINGLE
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.files.json_file import write_json
from dflash_trt.files.write import OutputKind, new_directory

CARRIED_KEYS = {
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "pad_token_id",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of transformers' configurations that no draft's computation depends on."""
WRITTEN = OutputKind(
    name="a checkpoint that dflash-trt wrote", recognizes=lambda directory: is_ours(directory / SINGLE)
)


class Verifier(msgspec.Struct, frozen=True, kw_only=True):
    """The target, which Speculators' files call the verifier."""

    name: str
    architectures: Sequence[str]


def convert_dialect(
    draft: DraftCheckpoint, layout: Layout, output: Path, *, verifier: Verifier | None = None, force: bool = False
) -> None:
    """Writes `draft` to the new directory `output`, tensors byte for byte or decoded; Speculators needs a `verifier`.

    Raises CheckpointError for what the layout cannot hold, and for decoded weights that are not finite; BuildError when
    `output` exists and `force` is false, holds the draft, or cannot be written.
    """
    with new_checkpoint(draft, output, force=force) as directory:
        config, details = _config(draft, layout, verifier)
        check_finite(tensor for tensor in draft.weights.values() if isinstance(tensor, DecodedTensor))
        tensors = layout.stored(draft.weights)
        derived = _t2d(draft) if layout.name == "speculators" else {}
        sizes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        sizes |= {name: ("BOOL", values.shape) for name, values in derived.items()}
        with SafetensorsWriter(directory / SINGLE, aligned(sizes), metadata={PRODUCER_KEY: PRODUCER}) as writer:
            for tensor in tensors.values():
                writer.copy(tensor)
            for name, values in derived.items():
                writer.write(name, values)
        write_json(directory / "config.json", config)
        if details is not None:
            write_json(directory / HF_QUANT_CONFIG, details)
        _check(draft, read_draft(directory))


@contextmanager
def new_checkpoint(draft: DraftCheckpoint, output: Path, *, force: bool) -> Iterator[Path]:
    """A directory that becomes `output`, with the draft's files other than weights and configuration copied.

    Raises BuildError, also where `output` would replace the draft itself.
    """
    if draft.directory.resolve().is_relative_to(os.path.realpath(output)):
        raise BuildError(
            f"{output} would replace the draft itself, {draft.directory}",
            hint="choose another -o DIR",
        )
    with new_directory(output, WRITTEN, force=force) as directory:
        yield directory
        copy_other_files(draft, directory)


def copy_other_files(draft: DraftCheckpoint, directory: Path) -> None:
    """Copies licence, model card, modelling code: every file of the checkpoint except weights and configuration.

    Files beside a GGUF file may belong to other models and are not copied.
    """
    if draft.directory.is_file():
        return
    weights = {".safetensors", *PICKLE_SUFFIXES}
    for file in sorted(draft.directory.iterdir()):
        is_written = file.name in (INDEX, "config.json", HF_QUANT_CONFIG)
        if file.is_file() and not file.name.startswith(".") and not is_written and file.suffix not in weights:
            shutil.copyfile(file, directory / file.name)


def _config(draft: DraftCheckpoint, layout: Layout, verifier: Verifier | None) -> tuple[Json, Json | None]:
    """config.json and, of a quantised draft, hf_quant_config.json."""
    config = layout.to_config(draft.spec, draft.torch_dtype())
    if verifier is not None:
        config = name_verifier(config, verifier.name, verifier.architectures)
    if (algorithms := draft.quantization.algorithms()) and not layout.holds_quantised:
        raise CheckpointError(
            f"{draft.directory}: expected an unquantised draft, which is what the layout {layout.name} holds, found"
            f" {', '.join(sorted(algorithms))}",
            hint="convert the checkpoint that it was quantised from",
        )
    carried = {key: value for key, value in draft.config.values().items() if key in CARRIED_KEYS}
    return claim(carried | config, draft.quantization, draft.spec.linear_modules())


def _t2d(draft: DraftCheckpoint) -> dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Speculators' t2d, redundant with d2t: whether the draft's head has each token [V] of the target."""
    if (token_ids := head_token_ids(draft.spec, draft.weights)) is None:
        return {}
    marked = np.zeros(draft.spec.vocab_size or 0, np.bool_)
    marked[token_ids] = True
    return {T2D: marked}


def _check(draft: DraftCheckpoint, written: DraftCheckpoint) -> None:
    """Compares the facts and tensors of the written checkpoint; a difference is a bug, never the user's error."""

    def facts(spec: DraftSpec) -> DraftSpec:
        return msgspec.structs.replace(spec, model_type="qwen3")  # modelopt and Speculators call every backbone that

    assert facts(written.spec) == facts(draft.spec), (written.spec, draft.spec)
    assert written.weights.keys() == draft.weights.keys()
    assert written.quantization == draft.quantization
