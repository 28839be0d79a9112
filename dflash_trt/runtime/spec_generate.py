# SPDX-License-Identifier: Apache-2.0
"""z-lab's `spec_generate` of draft checkpoints, as a function: token ids in, prompt and answer out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.cached_engine import engine_of
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.load import load_session, session_around
from dflash_trt.runtime.session import Session

ONE_REQUEST = RuntimeOptions(max_batch_size=1)


def spec_generate(
    draft: str | Path,
    target: str | Path | PreTrainedModel | None,
    input_ids: Tensor | Mapping[str, Tensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_token_ids: Collection[int] | None = None,
) -> Tensor:
    """Decodes one prompt with a DFlash draft; returns prompt and answer, [1, P + N], on the device of `input_ids`.

    `draft` is a draft checkpoint, whose engine is built once in the cache, or an engine directory. `target` is a
    checkpoint, by default the draft's known one, or a model that transformers has loaded, which then runs as it is.
    `input_ids` [1, P] may be in what `apply_chat_template` returns. The answer ends with the first of `stop_token_ids`,
    else after `max_new_tokens`; end-of-sequence tokens that are not among them do not end it. Each step verifies the
    whole block, and draws with a seed of torch's generator.

    The arguments have the meaning of DFlashDraftModel.spec_generate (z-lab/dflash, a3516f8). Both models are loaded in
    each call, except for a loaded target: for several prompts open an `LLM` once. Raises what `LLM` raises.
    """
    prompt = _prompt(input_ids)
    with closing(_open(draft, target)) as session:
        params = SamplingParams(
            max_tokens=max_new_tokens, temperature=temperature, stop_token_ids=stop_token_ids, ignore_eos=True,
            seed=int(torch.randint(2**63 - 1, ())),
        )  # fmt: skip
        answer = session.generate(prompt[0].tolist(), params)
    return torch.cat([prompt, torch.tensor([answer.token_ids], dtype=prompt.dtype, device=prompt.device)], dim=1)


def _prompt(given: Any) -> Tensor:
    """The token ids [1, P]; RequestError for anything else."""
    ids = given.get("input_ids") if isinstance(given, Mapping) else given
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1 or ids.is_floating_point():
        found = f"a tensor of shape {list(ids.shape)}" if isinstance(ids, Tensor) else shown(given)
        raise RequestError(f"input_ids: expected a tensor of token ids of shape [1, P], found {found}")
    return ids


def _open(draft: Any, target: Any) -> Session:
    """Session of a draft and a target that are named, or of a draft and a loaded model."""
    if not isinstance(draft, str | Path):
        raise RequestError(
            f"draft: expected a directory or a repository id, found {type(draft).__name__}",
            hint="give the name that from_pretrained took",
        )
    model = target if isinstance(target, PreTrainedModel) else None
    if model is None and not isinstance(target, str | Path | None):
        raise RequestError(
            f"target: expected a directory, a repository id or a transformers model, found {type(target).__name__}"
        )
    name = (target if model is None else model.name_or_path) or None
    pair = CheckedPair.read(*engine_of(str(draft), None if name is None else str(name)))
    return load_session(pair, ONE_REQUEST) if model is None else session_around(pair, model, ONE_REQUEST)
