# SPDX-License-Identifier: Apache-2.0
"""The trained fixture pairs and the prompts that were kept out of their training."""

from __future__ import annotations

import json

from dflash_trt.runtime.session import Session
from tests.paths import FIXTURES

PAIRS = ("tiny-gpt-oss", "tiny-qwen3")


def prompts(session: Session) -> list[list[int]]:
    """The held-out prompts as token ids."""
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()
    return [session.encode(json.loads(line)["prompt"]) for line in lines]
