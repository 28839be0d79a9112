# SPDX-License-Identifier: Apache-2.0
"""`build --head`: a draft gets an lm_head of its own, a quantised or trimmed copy of the target's.

Only proposals come from it; the target's own lm_head decides what is accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.dialects import own
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import D2T, HEAD
from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.checkpoint.quantization import BLOCK, FP8, NVFP4, Quantization
from dflash_trt.checkpoint.safetensors_file import Tensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.quantize.convert import pack_tensor, tensor_layout, write_quantised_config
from dflash_trt.quantize.scales import scale_of, tensor_amax

CHOICE = re.compile(r"(fp8|nvfp4)|trim:(\d+)(?::(fp8|nvfp4))?")
ALGORITHMS = {"fp8": FP8, "nvfp4": NVFP4}
DENSE_TYPES = ("BF16", "F16", "F32")
TRIMMED = "head.safetensors"


class HeadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What `--head` says besides `target`."""

    algorithm: str | None
    """FP8 or NVFP4, weights and input; None keeps the target's dtype."""
    num_tokens: int | None
    """N of trim:N; None keeps the whole vocabulary."""


def parse_head(text: str) -> HeadChoice | None:
    """The choice, None for `target`; raises ValueError for anything else than --head takes."""
    if text == "target":
        return None
    if (match := CHOICE.fullmatch(text)) is None:
        raise ValueError(text)
    whole, count, trimmed = match.groups()
    name = whole or trimmed
    return HeadChoice(algorithm=ALGORITHMS[name] if name else None, num_tokens=int(count) if count else None)


def with_head(
    draft: DraftCheckpoint,
    target: TargetCheckpoint,
    choice: HeadChoice,
    token_ids: NDArray[np.int64] | None,
    directory: Path,
) -> DraftCheckpoint:
    """`draft`, dense or quantised, with that head, written into the new `directory`; `token_ids` [N], rising, or None:
    all.

    BuildError for a draft that has a head already, CheckpointError for a target whose head cannot be copied.
    """
    if draft.spec.has_own_head:
        raise BuildError(
            f"{draft.directory}: expected a draft that borrows the target's lm_head, found one with its own",
            hint="build without --head",
        )
    directory.mkdir()
    head = _rows(_target_head(target), token_ids, directory / TRIMMED)
    if choice.algorithm == NVFP4 and head.shape[1] % BLOCK:
        raise CheckpointError(f"{head.file}: {HEAD}: expected columns in multiples of {BLOCK}, found {head.shape[1]}")
    algorithms = draft.quantization.modules | ({HEAD: choice.algorithm} if choice.algorithm else {})
    quantization = Quantization(modules=algorithms, fp8_kv_cache=draft.quantization.fp8_kv_cache)
    spec = msgspec.structs.replace(draft.spec, draft_vocab_size=head.shape[0])
    layout = tensor_layout(spec, draft.weights | {head.name: head}, quantization)
    with SafetensorsWriter(directory / SINGLE, layout) as writer:
        for tensor in draft.weights.values():
            writer.copy(tensor)
        if choice.algorithm is None:
            writer.copy(head)
        else:
            pack_tensor(writer, head, choice.algorithm, scale_of(choice.algorithm, tensor_amax(head, 0)), 0)
            writer.write(f"{HEAD}.input_scale", scale_of(choice.algorithm, _input_bound(draft)))
        if token_ids is not None:
            writer.write(D2T, token_ids - np.arange(len(token_ids)))
    modules = [*spec.linear_modules(), HEAD]
    write_quantised_config(own.to_config(spec, draft.torch_dtype()), quantization, modules, directory)
    (directory / TRIMMED).unlink(missing_ok=True)
    return read_draft(directory)


def _target_head(target: TargetCheckpoint) -> Tensor:
    """lm_head.weight [V, H], or the embedding table where the target has no other."""
    if biases := [name for name in target.weights if name.endswith("lm_head.bias")]:
        raise CheckpointError(f"{target.directory}: expected an lm_head without bias, found {biases[0]!r}")
    heads = [tensor for name, tensor in target.weights.items() if name.endswith("lm_head.weight")]
    heads = heads or [tensor for name, tensor in target.weights.items() if name.endswith("embed_tokens.weight")]
    if len(heads) != 1:
        raise CheckpointError(f"{target.directory}: expected one tensor named *lm_head.weight, found {len(heads)}")
    head, shape = heads[0], (target.spec.vocab_size, target.spec.hidden_size)
    if head.shape != shape or head.dtype not in DENSE_TYPES:
        raise CheckpointError(
            f"{head.file}: tensor {head.name!r}: expected {'/'.join(DENSE_TYPES)} {list(shape)}, found {head.dtype}"
            f" {list(head.shape)}",
            hint="give --target a checkpoint whose lm_head is not quantised",
        )
    return head


def _rows(head: Tensor, token_ids: NDArray[np.int64] | None, file: Path) -> Tensor:
    """The head as lm_head.weight, where it lies, or its rows `token_ids` in a `file` of their own."""
    name = f"{HEAD}.weight"
    if token_ids is None:
        return msgspec.structs.replace(head, name=name)
    with SafetensorsWriter(file, {name: (head.dtype, (len(token_ids), head.shape[1]))}) as writer:
        writer.write(name, map_tensor(head)[token_ids])
    return read_tensors(file)[name]


def _input_bound(draft: DraftCheckpoint) -> float:
    """What no value behind the final norm exceeds: sqrt(H) max |norm| (`dflash_trt.quantize.bounds`)."""
    norm = as_float32(map_tensor(draft.weights["norm.weight"]))
    return math.sqrt(norm.size) * float(np.abs(norm).max())


def frequent_tokens(counts: NDArray[np.int64], always_kept: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
    """The ids [N], rising, of `always_kept` and the most frequent others by `counts` [V]; BuildError for a wrong N."""
    always = np.unique(np.array(always_kept, dtype=np.int64))
    if not len(always) <= num_tokens < len(counts):
        raise BuildError(
            f"--head trim:{num_tokens}: expected {len(always)} (special and byte tokens, which stay) to"
            f" {len(counts) - 1} tokens, found {num_tokens}"
        )
    order = np.argsort(-counts, kind="stable")
    frequent = order[~np.isin(order, always)][: num_tokens - len(always)]
    return np.sort(np.concatenate([always, frequent]))
