# SPDX-License-Identifier: Apache-2.0
"""Facts: a value of the right type, or an error that names file, key, expectation and finding; never another error."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.errors import CheckpointError
from tests.checkpoint.samples import refusal

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


@settings(max_examples=15)
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


FILE = Path("directory/config.json")
Read = Callable[[Facts], object]

WRONG_TYPES: list[tuple[str, Read, str, list[object]]] = [
    ("integer", lambda f: f.integer("key"), "an integer from 1 to", [None, True, 1.0, "1", [1], 0, -1, 2**31]),
    ("minimum", lambda f: f.integer("key", minimum=0), "an integer from 0 to", [-1, 10**400]),
    ("maximum", lambda f: f.integer("key", maximum=3), "an integer from 1 to 3", [4]),
    ("number", lambda f: f.number("key"), "a number > 0", [None, True, "1", 0, -0.5, float("nan"), float("inf")]),
    ("huge", lambda f: f.number("key", default=1), "a number > 0", [10**400, 1e39, 1e-39]),
    ("flag", lambda f: f.flag("key"), "true or false", [None, 0, 1, "true"]),
    ("default_flag", lambda f: f.flag("key", default=True), "true or false", [0, "false"]),
    ("text", lambda f: f.text("key"), "a string", [None, 1, ["a"], "\ud800", "\x1b[2J"]),
    ("choice", lambda f: f.text("key", choices=("a", "b")), "one of a, b", ["c", "", None]),
    ("integers", lambda f: f.integers("key"), "a list of integers >= 0", [None, 1, [], [1, -1], [True], ["1"]]),
    ("texts", lambda f: f.texts("key"), "a list of strings", [None, "a", ["a", 1]]),
    ("texts_by_name", lambda f: f.texts_by_name("key"), "an object of strings", [None, [], {"a": 1}, {"a": None}]),
    ("section", lambda f: f.section("key"), "an object", [None, [], "a"]),
]
HAVE_A_DEFAULT = ("huge", "default_flag")
CASES = [
    pytest.param(read, expected, value, id=f"{name}-{i}")
    for name, read, expected, values in WRONG_TYPES
    for i, value in enumerate(values)
]


@pytest.mark.parametrize(("read", "expected", "value"), CASES)
def test_wrong_type(read: Read, expected: str, value: object) -> None:
    message = refusal(lambda: read(Facts({"key": value}, FILE)))
    assert message.startswith(f"{FILE}: key: expected {expected}")
    assert f"found {json.dumps(value)}"[:100] in message


@pytest.mark.parametrize("read", [read for name, read, *_ in WRONG_TYPES if name not in HAVE_A_DEFAULT])
def test_missing(read: Read) -> None:
    assert refusal(lambda: read(Facts({}, FILE))).startswith(f"{FILE}: missing key ")


def test_right_types() -> None:
    facts = Facts({"i": 3, "n": 2, "f": False, "t": "a", "is": [0, 1], "ts": ["a"], "null": None}, FILE)
    assert (facts.integer("i"), facts.number("n"), facts.flag("f"), facts.text("t")) == (3, 2.0, False, "a")
    assert (facts.integers("is"), facts.texts("ts")) == ((0, 1), ("a",))
    assert facts.number("absent", default=5) == 5
    assert (facts.optional("i", facts.integer), facts.optional("null", facts.integer)) == (3, None)
    assert Facts({"by": {"a": "b"}}, FILE).texts_by_name("by") == {"a": "b"}
    assert facts.flag("null", default=True) is True
    assert "null" not in facts
    assert facts.keys() == {"i", "n", "f", "t", "is", "ts"}


def test_a_section_names_its_scope() -> None:
    section = Facts({"outer": {"inner": {"key": "x"}}}, FILE).section("outer").section("inner")
    assert refusal(lambda: section.integer("key")).startswith(f"{FILE}: outer.inner.key: expected")


def test_a_long_value_is_quoted_in_part() -> None:
    message = refusal(lambda: Facts({"key": ["x"] * 1000}, FILE).integers("key"))
    assert message.endswith('"x", "x",...')
    assert len(message) < 300


@pytest.mark.parametrize(
    ("content", "found"), [(b"{", "Expecting property name"), (b"[1]", "a JSON object, found list")]
)
def test_no_json_object(content: bytes, found: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    message = refusal(lambda: Facts.load(file))
    assert message.startswith(f"{file}: expected ")
    assert found in message


def test_missing_or_unreadable_file(tmp_path: Path) -> None:
    message = refusal(lambda: Facts.load(tmp_path / "config.json"))
    assert "no such file: expected a model configuration" in message
    assert "hint: check the path" in message
    (tmp_path / "config.json").mkdir()
    message = refusal(lambda: Facts.load(tmp_path / "config.json"))
    assert "Is a directory" in message
