# SPDX-License-Identifier: Apache-2.0
"""The kernel's benchmark and counter start without a GPU."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from benchmarks.bench_kv_injection_attention import main as bench
from tools.count_kernel import main as count


@pytest.mark.parametrize(("command", "options"), [(bench, ["--dry-run", "--only", "a rank of 8"]), (count, ["--help"])])
def test_it_starts(command: click.Command, options: list[str]) -> None:
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
