# SPDX-License-Identifier: Apache-2.0
"""The default run imports no module that it would deselect, and every other run collects them all."""

from pathlib import Path

import pytest

from tests.conftest import DEFAULT_MARKS, pytest_ignore_collect


def is_left_out(text: str, directory: Path, config: pytest.Config) -> bool | None:
    file = directory / "test_planted.py"
    file.write_text(f"import pytest\n\n{text}\n")
    return pytest_ignore_collect(file, config)


@pytest.mark.parametrize("mark", ["full", "gpu"])
def test_slow_modules_are_left_out_of_the_default_run_alone(
    mark: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEFAULT_MARKS in pytestconfig.getini("addopts")
    slow = [
        f"pytestmark = pytest.mark.{mark}",
        f"pytestmark = [\n    pytest.mark.{mark},\n    pytest.mark.skipif(True)]",
    ]
    others = [f"@pytest.mark.{mark}\ndef test(): ...", "pytestmark = pytest.mark.fuller", ""]
    monkeypatch.setattr(pytestconfig.option, "markexpr", DEFAULT_MARKS)
    assert [is_left_out(text, tmp_path, pytestconfig) for text in slow + others] == [True, True, None, None, None]
    for other in ("full", "gpu", "not gpu", ""):
        monkeypatch.setattr(pytestconfig.option, "markexpr", other)
        assert is_left_out(slow[0], tmp_path, pytestconfig) is None
