# SPDX-License-Identifier: Apache-2.0
"""The strict reader: three different errors, and nothing else escapes whatever the file holds."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import ConfigError
from dflash_trt.files.strict_yaml import MAX_BYTES, MAX_DEPTH, load_yaml, nearest, read_yaml, yaml_documents


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=1)]
    colour: Literal["red", "green"] = "red"


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    count: int
    purpose: Literal["latency", "throughput"] = "latency"
    choice: Literal["a1", "b2"] | None = None
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()


def load(tmp_path: Path, text: str) -> Outer:
    file = tmp_path / "outer.yaml"
    file.write_text(text)
    return load_yaml(file, Outer, ConfigError)


def test_a_good_file(tmp_path: Path) -> None:
    assert load(tmp_path, "name: x\ncount: 2\ninner: {size: 3}\nmany: [{size: 1, colour: green}]\n") == Outer(
        name="x", count=2, inner=Inner(size=3), many=(Inner(size=1, colour="green"),)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ncuont: 2\n", "outer.yaml: unknown key cuont"),
        ("name: x\ncuont: 2\n", "(nearest key: count): expected only name"),
        ("name: x\ncount: 2\ninner: {sise: 3}\n", "inner.sise (nearest key: size): expected only size, colour"),
        ("name: x\ncount: 2\nmany: [{size: 1}, {color: red}]\n", "unknown key many[1].color"),
        ("name: x\n", "missing key count: found only name"),
        ("{}", "missing key name: found only an empty mapping"),
        ("name: x\ncount: 2\ninner: {}\n", "missing key inner.size"),
        ("name: x\ncount: two\n", "count: expected `int`, got `str`"),
        ("name: x\ncount: true\n", "count: expected `int`, got `bool`"),
        ("name: x\ncount: 2\ninner: {size: big}\n", "inner.size: expected `int`, got `str`"),
        ("name: x\ncount: 2\nmany: [{size: 1}, {size: -3}]\n", "many[1].size: expected `int` >= 1, found -3"),
        ("name: x\ncount: 2\ninner: 3\n", "inner: expected `object | null`, got `int`"),
        ("name: x\ncount: 2\npurpose: latncy\n", "purpose: expected one of latency, throughput, found 'latncy'"),
        ("name: x\ncount: 2\npurpose: latncy\n", "(nearest value: latency)"),
        ("name: x\ncount: 2\nchoice: a11\n", "choice: expected one of a1, b2, found 'a11' (nearest value: a1)"),
        ("name: x\ncount: 2\ninner: {size: 1, colour: blue}\n", "inner.colour: expected one of green, red"),
        ("name: x\nname: y\ncount: 2\n", "key 'name' twice"),
        ("- 1\n", "document: expected `object`, got `array`"),
        ("name: [\n", "expected YAML"),
        ("name: !!python/object/apply:os.system ['true']\ncount: 1\n", "expected YAML"),
    ],
)
def test_what_is_said_about_a_bad_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert "outer.yaml" in caught.value.message


DEEP = f"more than {MAX_DEPTH} levels"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: !!python/name:os.system ''", "the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("a: ! b", "the tag '!'"),
        ("a: &x [1]\nb: *x", "the alias *x"),
        ("a: &x [*x]", "the alias *x"),
        ("<<: {a: 1}", "could not determine a constructor"),
        ("[a]: b", "a key that is not a plain value"),
        ("1: a\n1.0: b", "key 1.0 twice"),
        ("a: 0x" + "f" * 6000, "a number of 6002 characters"),
        ("a: 1" + ":1" * 300 + ".0", "a number of 603 characters"),
        ("a: 18446744073709551616", "the integer 18446744073709551616, beyond 64 bits"),
        ("a: 2026-13-45", "month must be in 1..12"),
        ('a: "\\ud800"', r"the character '\ud800'"),
        ('a: "\\x1b[2J"', r"the character '\x1b'"),
        ('"\\x07": 1', r"the character '\x07'"),
        ('a: "\\U00110000"', "chr() arg"),
        ("a: \x1b", "unacceptable character #x001b"),
        ("[" * 100_000, DEEP),
        ("a: 1\n---\nb: 2", "another document"),
    ],
)
def test_what_is_no_plain_data(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "outer.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"outer\.yaml: expected YAML, found ") as caught:
        read_yaml(tmp_path / "outer.yaml", ConfigError)
    assert found in caught.value.message


def test_limits(tmp_path: Path) -> None:
    file = tmp_path / "outer.yaml"
    file.write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    read_yaml(file, ConfigError)
    file.write_text("a: |\n  1\n  2\t3\nb: 1_000\nc: 0x10\nd: -1.5e+3\ne: &unused 1\n")
    assert read_yaml(file, ConfigError) == {"a": "1\n2\t3\n", "b": 1000, "c": 16, "d": -1500.0, "e": 1}
    file.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=f"expected at most {MAX_BYTES} bytes, found more"):
        read_yaml(file, ConfigError)


def test_an_alias_bomb_as_keys(tmp_path: Path) -> None:
    """Each line doubles the one before; as a key that stands twice it was expanded, and printed."""
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)), "? *a39\n: 1"]
    (tmp_path / "outer.yaml").write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(ConfigError, match=r"the alias \*a0"):
        read_yaml(tmp_path / "outer.yaml", ConfigError)


def test_unreadable_files_and_long_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_yaml(tmp_path / "absent.yaml", ConfigError)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="expected text, found byte 0xff at 0"):
        read_yaml(tmp_path / "bytes.yaml", ConfigError)
    (tmp_path / "outer.yaml").write_text("a" * 100_000 + ": 1\n")
    with pytest.raises(ConfigError) as caught:
        load_yaml(tmp_path / "outer.yaml", Outer, ConfigError)
    assert len(caught.value.message) < 1000, "long names are cut"


def test_nearest() -> None:
    assert nearest("max_batch_siz", ["max_batch_size", "max_seq_len"]) == "max_batch_size"
    assert nearest("zebra", ["max_batch_size"]) is None


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
KEYED = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("name", "count", "purpose", "choice", "inner", "many", "other"), DOCUMENTS)
)


def load_or_refuse(tmp_path: Path, text: str) -> Outer | str:
    """The loaded document or the error's message; any other exception fails the test."""
    try:
        return load(tmp_path, text)
    except ConfigError as error:
        return error.message


@settings(max_examples=40)
@given(document=DOCUMENTS | KEYED)
def test_anything_is_read_or_refused_by_name(tmp_path: Path, document: object) -> None:
    """Every document is either an Outer with exactly its values, or one ConfigError that names the file."""
    loaded = load_or_refuse(tmp_path, yaml.safe_dump(document))
    if isinstance(loaded, str):
        assert "outer.yaml" in loaded
        return
    assert isinstance(document, dict)
    assert set(document) <= {"name", "count", "purpose", "choice", "inner", "many"}
    assert (loaded.name, loaded.count) == (document["name"], document["count"])


@settings(max_examples=30)
@given(text=st.text() | st.text(alphabet="{}[]:,-&*!|>'\"\n #ab1"))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    loaded = load_or_refuse(tmp_path, text)
    assert isinstance(loaded, Outer) or "outer.yaml" in loaded


def test_several_documents() -> None:
    text = "---\na: 1\n---\n- b\n"
    assert yaml_documents(text, Path("file"), ConfigError) == [{"a": 1}, ["b"]]
    with pytest.raises(ConfigError, match="file: expected YAML, found the alias"):
        yaml_documents(f"{text}---\n*a\n", Path("file"), ConfigError)
