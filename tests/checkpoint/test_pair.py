# SPDX-License-Identifier: Apache-2.0
"""Whether a draft fits its target."""

from pathlib import Path

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.target_checkpoint import read_target
from tests.checkpoint.samples import edit_config, refusal, write_target


@pytest.mark.parametrize(
    ("target_facts", "words"),
    [
        ({"hidden_size": 64}, "hidden_size: expected 64 (target), found 48 (draft)"),
        ({"vocab_size": 100}, "vocab_size: expected 100 (target), found 96 (draft)"),
        ({"num_hidden_layers": 8}, "num_target_layers: expected 8 (target), found 6 (draft)"),
        ({"model_type": "qwen3"}, "model_type: expected qwen3 (target), found gpt_oss (draft)"),
    ],
)
def test_swapped_target(target_facts: dict[str, object], words: str, draft_dir: Path, tmp_path: Path) -> None:
    target = read_target(write_target(tmp_path / "other", **target_facts)).spec
    message = refusal(lambda: check_pair(read_draft(draft_dir).spec, target, draft_name="DRAFT", target_name="TARGET"))
    assert f"DRAFT does not fit target TARGET: {words}" in message
    assert "hint: give --target the model that this draft was trained for" in message


@pytest.mark.parametrize(
    ("model_type", "tap_width", "refused"),
    [
        ("deepseek_v4", None, None), ("glm5_next", None, None),  # the mean of the streams
        ("deepseek_v4", 4 * 48, None), ("hy_v4", 4 * 48, None),  # all of them
        ("hy_v4", None, "width of a tap of hy_v4's 4 residual streams: expected all of them (192)"),
        ("deepseek_v4", 2 * 48, "hidden_size: expected 48 (target), found 96 (draft)"),
    ],
)  # fmt: skip
def test_taps_of_several_residual_streams(
    model_type: str, tap_width: int | None, refused: str | None, draft_dir: Path, tmp_path: Path
) -> None:
    """A draft's width tells whether it reads their mean or all of them; other widths are refused."""
    target = read_target(write_target(tmp_path / "other", model_type=model_type, hc_mult=4)).spec
    draft = msgspec.structs.replace(read_draft(draft_dir).spec, model_type="qwen3", tap_hidden_size=tap_width)

    def check() -> None:
        check_pair(draft, target, draft_name="DRAFT", target_name="TARGET")

    if refused is None:
        check()
    else:
        assert refused in refusal(check)


def test_tap_out_of_range(draft_dir: Path, tmp_path: Path) -> None:
    """Where the draft does not say how many layers its target has, its taps do; the last layer is in range."""
    draft = read_draft(edit_config(draft_dir, "num_target_layers")).spec
    fits, short = (read_target(write_target(tmp_path / str(n), num_hidden_layers=n)).spec for n in (4, 3))
    check_pair(draft, fits, draft_name="DRAFT", target_name="TARGET")
    message = refusal(lambda: check_pair(draft, short, draft_name="DRAFT", target_name="TARGET"))
    assert "target_layer_ids: expected layers 0 to 2 (target), found [1, 2, 3] (draft)" in message


def test_a_draft_exported_as_qwen3_fits_a_gpt_oss_target(draft_dir: Path, target_dir: Path) -> None:
    draft = read_draft(edit_config(draft_dir, model_type="qwen3")).spec
    check_pair(draft, read_target(target_dir).spec, draft_name="DRAFT", target_name="TARGET")
