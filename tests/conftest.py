# SPDX-License-Identifier: Apache-2.0
"""What every test is run with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch or huggingface_hub; subprocesses inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network, and none may reach for it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # barriers among oversubscribed threads cost more than they gain


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """A small random gpt-oss draft: three layers, taps 1, 2 and 3, vocabulary 96, block 6, YaRN, BF16."""
    from tests.reference.synthetic import write_random_draft

    return write_random_draft(tmp_path / "draft", dialect="gpt_oss")


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """A target with the facts that `draft_dir` demands, and of its weights the embedding only."""
    from tests.checkpoint.samples import write_target

    return write_target(tmp_path / "target")
