# SPDX-License-Identifier: Apache-2.0
"""A fact that config.json states under several names is compared, in every dialect; a contradiction names both."""

from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.checkpoint.dialect_samples import WRITERS
from tests.checkpoint.samples import edit_config, refusal
from tests.reference.synthetic import write_random_draft

PLACES = ("", "dflash_config__", "eagle_config__")
STATED = {
    "eagle_aux_hidden_state_layer_ids": ([2, 3, 4], [1, 2, 3]), "aux_hidden_state_layer_ids": ([2, 3, 4], [2, 3, 5]),
    "target_layer_ids": ([1, 2, 3], [2, 3, 4]),
    "num_aux_layers": (3, 4), "num_aux_hidden_states": (3, True), "mask_token_id": (95, 94), "pard_token": (95, 0),
    "num_target_layers": (6, 7), "target_num_hidden_layers": (6, 6.5), "block_size": (6, 5),
    "target_hidden_size": (48, 96),
}  # fmt: skip
"""Value that agrees with the sample's facts, and one that does not, by key."""
FIRST = {"dflash_config__target_layer_ids", "dflash_config__mask_token_id", "num_target_layers", "block_size"}
"""Places where the sample states these facts."""


@pytest.mark.parametrize(("key", "place"), [(k, p) for k in STATED for p in PLACES if p + k not in FIRST])
def test_a_second_name_agrees(key: str, place: str, tmp_path: Path) -> None:
    directory = write_random_draft(tmp_path / "draft", dialect="qwen3")
    expected = read_draft(directory).spec
    right, wrong = STATED[key]
    if place == "eagle_config__":  # a section of EAGLE's, which holds nothing else
        edit_config(directory, eagle_config={})
    assert read_draft(edit_config(directory, **{place + key: right})).spec == expected
    message = refusal(lambda: read_draft(edit_config(directory, **{place + key: wrong})))
    assert key in message
    assert str(wrong).replace("True", "true") in message or "expected" in message


@pytest.mark.parametrize("name", WRITERS)
def test_every_dialect_compares_the_taps(name: str, tmp_path: Path) -> None:
    directory = WRITERS[name](tmp_path / name)
    entered = [tap + 1 for tap in read_draft(directory).spec.target_layer_ids]
    key = "eagle_aux_hidden_state_layer_ids"
    assert read_draft(edit_config(directory, **{key: entered})).spec
    message = refusal(lambda: read_draft(edit_config(directory, **{key: [tap - 1 for tap in entered]})))
    words = (
        f"config.json: {key} is {[tap - 1 for tap in entered]}, but the other keys of this fact mean {entered} there"
    )
    assert words in message
    assert "keep the one that the draft was trained with" in message


def test_names_of_dsparks_targets(tmp_path: Path) -> None:
    directory = WRITERS["dspark"](tmp_path / "dspark")
    spec = read_draft(directory).spec
    edit_config(directory, dspark_target_layer_ids=list(spec.target_layer_ids), dspark_noise_token_id=5)
    words = f"dspark_noise_token_id is 5, but the other keys of this fact mean {spec.mask_token_id} there"
    assert words in refusal(lambda: read_draft(directory))
    assert read_draft(edit_config(directory, dspark_noise_token_id=spec.mask_token_id)).spec == spec
