# SPDX-License-Identifier: Apache-2.0
"""Values of templates are quoted for the language of the template, whatever they contain."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.deploy.cluster import template
from dflash_trt.deploy.cluster.template import Text, manifest, shell_text, yaml_text
from dflash_trt.errors import ConfigError

HOSTILE = ["$(touch x)", "a b'c", '"; exit 1; #', "<name>", "--", "`id`", "{a: b}", "&x", "no", "0o17"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a template."""
    monkeypatch.setattr(template, "TEMPLATES", tmp_path)
    return lambda name, text: (tmp_path / name).write_text(text)


def test_shell_words_arrive_as_they_are(write: Any) -> None:
    write("words.sh", "printf '%s\\0' <word> <words>\n")
    for value in HOSTILE:
        script = shell_text("words.sh", word=value, words=[value, "x"])
        found = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True).stdout
        assert found.split("\0")[:-1] == [value, value, "x"]
    with pytest.raises(ConfigError, match="expected printable characters"):
        shell_text("words.sh", word="a\x1b", words=[])


def test_texts_and_empty_lines_of_a_shell_template(write: Any) -> None:
    write("lines.sh", "<first>\na<second>b <count>\n<third>\n")
    assert shell_text("lines.sh", first=Text("x | y"), second=Text(""), third=Text(""), count=3) == "x | y\nab 3\n"


def test_yaml_values_arrive_as_they_are(write: Any) -> None:
    write("tree.yaml", "a: <value>\nb: [x, <value>, <none>, <items>]\nc: <none>\nd: {e: <mapping>}\n")
    for value in [*HOSTILE, 3, True]:
        filled = manifest("tree.yaml", value=value, none=None, items=[1, value], mapping={"f": [value]})
        assert filled == {"a": value, "b": ["x", value, 1, value], "d": {"e": {"f": [value]}}}
        assert list(yaml.safe_load_all(yaml_text([filled, filled]))) == [filled, filled]
