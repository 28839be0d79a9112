# SPDX-License-Identifier: Apache-2.0
"""Files of prompts, as text or token ids, with one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.api.chat_template import TemplateOptions, encode
from dflash_trt.errors import RequestError
from dflash_trt.files.json_file import read_json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a prompts file: either a text or its token ids."""

    id: str = ""
    """Name in reports and errors; "line N" where the file has no id."""
    text: str | None = msgspec.field(default=None, name="prompt")
    token_ids: list[int] | None = None
    category: str | None = None
    """Kind of prompt, where the file says so; reports then have figures by category."""
    language: str | None = None
    """Language of the prompt, where the file says so; reports then have figures by language."""

    def encode(self, tokenizer: PreTrainedTokenizerBase, template: TemplateOptions | None = None) -> list[int]:
        """Token ids of the prompt; `template` wraps text in the tokenizer's chat template."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return encode(tokenizer, self.text, template)


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
