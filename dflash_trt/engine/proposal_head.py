# SPDX-License-Identifier: Apache-2.0
"""`build --head`: gives a draft an lm_head of its own, a quantised or trimmed copy of the target's.

It only proposes; the target's own lm_head decides which tokens are accepted.
"""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt._C import amax
from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.dialects import own
from dflash_trt.checkpoint.draft_checkpoint import torch_dtype
from dflash_trt.checkpoint.draft_spec import D2T, HEAD
from dflash_trt.checkpoint.number_formats import BLOCK, FP8, NVFP4
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, input_embedding
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.quantize.packing import pack
from dflash_trt.quantize.scales import naming, scale_of
from dflash_trt.quantize.unwritten_draft import UnwrittenDraft, tensor_layout, with_claims

CHOICE = re.compile(r"(fp8|nvfp4)|trim:(\d+)(?::(fp8|nvfp4))?")
ALGORITHMS = {"fp8": FP8, "nvfp4": NVFP4}
DENSE_TYPES = ("BF16", "F16", "F32")


class HeadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The head that --head asks for."""

    algorithm: str | None
    """FP8 or NVFP4, weights and input; None keeps the target's dtype."""
    num_tokens: int | None
    """N of trim:N; None keeps the whole vocabulary."""


def parse_head(text: str) -> HeadChoice:
    """The choice of a head other than `target`; raises ValueError for text that --head does not accept."""
    if (match := CHOICE.fullmatch(text)) is None:
        raise ValueError(f"expected target, fp8, nvfp4, trim:N, trim:N:fp8 or trim:N:nvfp4, found {text}")
    whole, count, trimmed = match.groups()
    name = whole or trimmed
    return HeadChoice(algorithm=ALGORITHMS[name] if name else None, num_tokens=int(count) if count else None)


def with_head(
    draft: UnwrittenDraft, target: TargetCheckpoint, choice: HeadChoice, token_ids: NDArray[np.int64] | None
) -> UnwrittenDraft:
    """`draft`, dense or quantised, with that head; `token_ids` [N] are the rows it keeps, in increasing order, or None
    for all.

    BuildError for a draft that has a head already, CheckpointError for a target whose head cannot be copied.
    """
    if draft.spec.has_own_head:
        raise BuildError(
            f"{draft.origin.directory}: expected a draft that borrows the target's lm_head, found one with its own",
            hint="build without --head",
        )
    if draft.spec.lilicorr is not None and token_ids is not None:
        raise BuildError(
            f"{draft.origin.directory}: a LiLiCorr draft needs probabilities over the whole vocabulary",
            hint="build with --head fp8 or --head nvfp4, or without --head",
        )
    head, algorithm = _target_head(target), choice.algorithm
    weights = map_tensor(head) if token_ids is None else map_tensor(head)[token_ids]
    if algorithm == NVFP4 and weights.shape[1] % BLOCK:
        raise CheckpointError(f"{head.file}: {HEAD}: expected columns in multiples of {BLOCK}, found {head.shape[1]}")
    with naming(head):
        largest = amax(weights)
    norm = as_float32(map_tensor(draft.origin.weights["norm.weight"]))
    # The largest value after the final norm (quantize.bounds).
    input_bound = math.sqrt(norm.size) * float(np.abs(norm).max())

    def write(writer: SafetensorsWriter) -> None:
        draft.write_tensors(writer)
        if algorithm is None:
            writer.write(f"{HEAD}.weight", weights)
        else:
            pack(writer, HEAD, head, weights, algorithm, scale_of(algorithm, largest), 0)
            writer.write(f"{HEAD}.input_scale", scale_of(algorithm, input_bound))
        if token_ids is not None:
            writer.write(D2T, token_ids - np.arange(len(token_ids)))

    spec = msgspec.structs.replace(draft.spec, draft_vocab_size=len(weights))
    modules = draft.quantization.modules | ({HEAD: algorithm} if algorithm else {})
    dtypes = {name: dtype for name, (dtype, _) in sorted(draft.layout.items())}
    quantization = msgspec.structs.replace(draft.quantization, modules=modules)
    layout = tensor_layout(spec, dtypes | {f"{HEAD}.weight": head.dtype}, quantization)
    config = own.to_config(spec, torch_dtype(dtypes.values()))
    return with_claims(draft.origin, spec, config, quantization, layout=layout, write_tensors=write)


def _target_head(target: TargetCheckpoint) -> StoredTensor:
    """lm_head.weight [V, H], or the embedding table where the target has no other."""
    if biases := [name for name in target.weights if name.endswith("lm_head.bias")]:
        raise CheckpointError(f"{target.directory}: expected an lm_head without bias, found {biases[0]!r}")
    heads = [tensor for name, tensor in target.weights.items() if name.endswith("lm_head.weight")]
    heads = heads or [input_embedding(target.directory, target.spec, target.weights)]
    if len(heads) != 1:
        raise CheckpointError(f"{target.directory}: expected one tensor named *lm_head.weight, found {len(heads)}")
    head, shape = heads[0], (target.spec.vocab_size, target.spec.hidden_size)
    if head.shape != shape or head.dtype not in DENSE_TYPES:
        hint = "give --target a checkpoint whose lm_head is not quantised"
        raise head.error(f"{'/'.join(DENSE_TYPES)} {list(shape)}", hint=hint)
    return head
