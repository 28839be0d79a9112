# SPDX-License-Identifier: Apache-2.0
"""Random texts of a grammar, token by token under its masks."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

import numpy as np
from jsonschema.validators import validator_for
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from tests.paths import FIXTURES

VOCAB_SIZE, END = 1024, 0
MAX_TOKENS = 400
CLOSING = '"}],'


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
    return loaded


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE, {END})


@cache
def closing_tokens() -> frozenset[int]:
    """Tokens that end a text, an object or an array of JSON, which keeps random texts short."""
    return frozenset(t for t in range(VOCAB_SIZE) if str(tokenizer().decode([t])).strip()[:1] in [*CLOSING])


def sample(grammar: Grammar, random: Random) -> str | None:
    """A random text of the grammar, None where it is longer than MAX_TOKENS; RequestError where it is refused."""
    guided = compiler().processor(grammar)
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        logits = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
        guided.process(logits, [])
        allowed = np.flatnonzero(np.isfinite(logits[0])).tolist()
        if END in allowed and (len(allowed) == 1 or random.random() < 0.3):
            return str(tokenizer().decode(token_ids))
        closing = [token for token in allowed if token in closing_tokens()]
        choices = closing if closing and random.random() < 0.5 else [token for token in allowed if token != END]
        token_ids.append(random.choice(choices))
        guided.advance(token_ids[-1:])
    return None


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a JSON text satisfies a schema and the formats in it; numbers are exact, as multipleOf needs."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = validator_for(schema)
    answer = json.loads(text, parse_float=Decimal)
    return bool(validator(exact, format_checker=validator.FORMAT_CHECKER).is_valid(answer))
