# SPDX-License-Identifier: Apache-2.0
"""Scripts of findings/ have one form, stand in its table and are linked; running them is `make findings`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY
from tests.test_layout import tracked
from tools.findings import main, run

FINDINGS = REPOSITORY / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.sh"))


def test_the_table_names_exactly_the_scripts() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.sh\) \|(?: [^|]+ \|){3}$", (FINDINGS / "README.md").read_text(), re.MULTILINE
    )
    assert rows == [(script.stem, script.stem) for script in SCRIPTS]
    assert {file.name for file in FINDINGS.iterdir()} == {script.name for script in SCRIPTS} | {"README.md"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_stands_alone(script: Path) -> None:
    """Installs pinned packages in a folder of its own, runs them without dflash-trt and compares what they print."""
    text = script.read_text()
    shebang, *lines = text.splitlines()
    header = lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]
    assert shebang == "#!/usr/bin/env bash"
    assert re.match(r"# \S.* \d+\.\d+", header[0]), "a program and its version"
    assert len(header) >= 5
    assert any(line.startswith("# Expected: ") for line in header)
    for part in ("set -euo pipefail\n", "mktemp -d", "\ntrap ", "\ndiff <("):
        assert part in text
    assert re.search(r"pip\" (install|download) .*?==\d", text, re.DOTALL)
    assert not re.search(r"dflash|/home/|/work/|https?://(?!127\.0\.0\.1)", text)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], check=True)


def test_every_finding_is_linked_where_it_matters() -> None:
    names = [name for name in tracked() if not name.startswith(("findings/", "tests/test_findings.py"))]
    text = "".join(
        (REPOSITORY / name).read_text() for name in names if name.endswith((".py", ".md", ".onnxtxt", "file"))
    )
    assert [script.name for script in SCRIPTS if f"findings/{script.name}" not in text] == []


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("diff <(echo a) <(echo a)", "ok"),
        ("diff <(echo a) <(echo b)", "changed"),
        ("printf '1\\n' | diff - /dev/null", "changed"),
        ("exit 3", "not seen: exit status 3"),
        ("sleep 60", "not seen: longer than 0.5 s"),
    ],
)
def test_a_script_behaves_as_it_did_or_not(body: str, verdict: str, tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text(f"set -euo pipefail\n{body}\n")
    assert run(script, 0.5 if "sleep" in body else 60)[0] == verdict


def test_an_unknown_finding_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensorrt"]) == 2
    assert "error: no findings/tensorrt.sh; there are:\n  " in capsys.readouterr().err
