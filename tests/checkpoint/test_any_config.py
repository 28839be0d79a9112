# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in config.json: facts or a CheckpointError, never another error."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.errors import CheckpointError

EXTREMES: list[object] = [2**31, 10**400, 1e-320, 1e300, float("inf"), float("nan"), "\ud800", {"rope_type": "yarn"}]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(EXTREMES)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2))
SECTIONS = ["", "dflash_config", "rope_scaling"]
KEYS = [
    "architectures", "attention_bias", "block_size", "causal", "dflash_config", "factor", "head_dim", "hidden_size",
    "is_causal", "layer_types", "mask_token_id", "max_position_embeddings", "mscale", "mscale_all_dim", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "swa_window_size",
    "target_layer_ids", "text_config", "truncate", "use_sliding_window", "use_swa", "vocab_size",
]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(section=st.sampled_from(SECTIONS), key=st.sampled_from(KEYS), value=VALUES)
def test_any_value(section: str, key: str, value: object, draft_dir: Path, target_dir: Path) -> None:
    for directory, read in ((draft_dir, read_draft), (target_dir, read_target)):
        file = directory / "config.json"
        original = file.read_text()
        config = json.loads(original)
        place = config.setdefault(section, {}) if section else config
        place[key] = value
        file.write_text(json.dumps(config))
        with suppress(CheckpointError):
            assert read(directory).spec.vocab_size == 96
        file.write_text(original)
