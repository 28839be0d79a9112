# SPDX-License-Identifier: Apache-2.0
"""The trained fixture pairs and the prompts that were kept out of their training."""

import json
import shutil
from pathlib import Path

from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.runtime.session import Session
from tests.paths import FIXTURES

PAIRS = ("tiny-gpt-oss", "tiny-qwen3")


def prompts(of: Session | Path) -> list[list[int]]:
    """The held-out prompts as token ids, by the tokenizer of a session or of a target directory."""
    texts = [json.loads(line)["prompt"] for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()]
    tokenizer = of.tokenizer if isinstance(of, Session) else load_tokenizer(of)
    assert tokenizer is not None
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def without_template(name: str, directory: Path) -> Path:
    """A copy of the target `name` in `directory`, without its chat template."""
    ignored = shutil.ignore_patterns("chat_template.jinja")
    return shutil.copytree(FIXTURES / name, directory / name, ignore=ignored)
