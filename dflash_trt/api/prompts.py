# SPDX-License-Identifier: Apache-2.0
"""Prompts, as text or token ids, one JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.sampling_params import is_integer
from dflash_trt.api.tokenizer import encode
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.errors import RequestError, shown
from dflash_trt.files.json_file import read_json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a prompts file: either a text or its token ids."""

    id: str = ""
    """What reports and errors call it: "line N" where the file has no id."""
    text: str | None = msgspec.field(default=None, name="prompt")
    token_ids: list[int] | None = None
    category: str | None = None
    """What kind of prompt it is, where the file says so; reports then have figures by category, ..."""
    language: str | None = None
    """... and by language."""

    def encode(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False) -> list[int]:
        """Its token ids; `chat` wraps text in the tokenizer's chat template."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return encode(tokenizer, self.text, chat=chat)


def is_prompt(given: object) -> bool:
    """Whether it is one prompt, rather than a list of them: a text, or token ids in a list, tuple or array."""
    if isinstance(given, list | tuple):
        return bool(given) and not isinstance(given[0], str | bytes | list | tuple) and not hasattr(given[0], "__len__")
    return True


def prompt_token_ids(prompt: Any) -> list[Any]:
    """The token ids of a prompt in a list, a tuple or an array of one dimension; RequestError for anything else.

    `check_prompt` looks at the ids themselves.
    """
    if hasattr(prompt, "__array__"):
        import numpy as np

        prompt = prompt.tolist() if hasattr(prompt, "tolist") else np.asarray(prompt).tolist()
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"prompt: expected a text or a list of token ids, found {shown(prompt)}")
    return list(prompt)


def check_prompt(prompt_ids: Sequence[int], max_tokens: int, draft: DraftSpec, target: TargetSpec) -> None:
    """Raises RequestError for a prompt that target and draft cannot answer to its last token."""
    if not prompt_ids:
        raise RequestError("prompt: expected at least one token, found an empty prompt")
    vocabulary = range(target.vocab_size)
    if wrong := [token for token in prompt_ids if not (is_integer(token) and int(token) in vocabulary)]:
        raise RequestError(f"prompt: expected token ids from 0 to {target.vocab_size - 1}, found {shown(wrong[0])}")
    if draft.mask_token_id in prompt_ids:
        raise RequestError(f"prompt: expected text, found the draft's mask token {draft.mask_token_id}")
    limit = max_positions(draft, target)
    if (length := len(prompt_ids) + max_tokens) > limit:
        raise RequestError(
            f"prompt: expected at most {limit} tokens (max_position_embeddings), found {len(prompt_ids)}"
            f" in the prompt + {max_tokens} new ones = {length}",
            hint="lower --max-tokens or shorten the prompt",
        )


def max_positions(draft: DraftSpec, target: TargetSpec) -> int:
    """Tokens that target and draft have positions for."""
    return min(draft.max_position_embeddings, target.max_position_embeddings)


def read_prompts(file: Path) -> list[PromptLine]:
    """The prompts of a JSON Lines file: {"prompt": text} or {"token_ids": [...]}.

    Each may have an "id", a "category" and a "language". Raises RequestError when the file cannot be read, holds no
    prompt, or a line is not one.
    """
    prompts = []
    what = "an object with prompt or token_ids"
    for place, prompt in read_json_lines(file, PromptLine, RequestError, what=what, may_be_pipe=True):
        if (prompt.text is None) == (prompt.token_ids is None):
            found = "neither" if prompt.text is None else "both"
            raise RequestError(f"{place}: expected either prompt or token_ids, found {found}")
        name = prompt.id or f"line {place.rpartition(':')[2]}"
        prompts.append(msgspec.structs.replace(prompt, id=name))
    if not prompts:
        raise RequestError(f"{file}: expected at least one prompt, found none")
    return prompts
