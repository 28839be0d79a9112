# SPDX-License-Identifier: Apache-2.0
"""A target's vocabulary for llguidance, in which no text of a grammar is a special token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dflash_trt.errors import RequestError, cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Collection[int]
) -> tuple[Any, dict[str, int], set[str]]:
    """The llguidance.LLTokenizer of a fast tokenizer, ids of its special tokens by text, and the visible of these.

    llguidance 1.9.1 tokenises text that a grammar forces, and takes the name of a special token in it for that token,
    so an answer that had to be "<|endoftext|>" ended without any text. Here special tokens have names that no text
    contains, and grammars write them as ids. As in llguidance, added tokens in angle brackets are special; those that
    the tokenizer does not call special are visible in an answer's text.

    Raises RequestError for a tokenizer that cannot be read.
    """
    import llguidance

    try:
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        special = {
            str(added["content"]): int(added["id"])
            for added in document["added_tokens"]
            if added["special"] or (added["content"].startswith("<") and added["content"].endswith(">"))
        }
        hidden = {added["content"] for added in document["added_tokens"] if added["special"] or added["id"] in end_ids}
        _rename(document, {name: f"{secrets.token_hex(16)}-{token}" for name, token in special.items()})
        visible = {text for text in special if text not in hidden}
        read = llguidance.LLTokenizer(json.dumps(document), n_vocab=vocab_size, eos_token=sorted(end_ids))
        return read, special, visible
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = cut(str(error))
        raise RequestError(f"structured_outputs: the target's tokenizer is no fast tokenizer: {problem}") from None


def _rename(document: dict[str, Any], names: dict[str, str]) -> None:
    """Renames tokens in a tokenizer.json, and turns padding and truncation off."""
    document["padding"] = document["truncation"] = None
    for added in document["added_tokens"]:
        added["special"] = added["content"] in names
        added["content"] = names.get(added["content"], added["content"])
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        document["model"]["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:
        document["model"]["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
