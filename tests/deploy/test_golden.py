# SPDX-License-Identifier: Apache-2.0
"""Output of serve-config, byte for byte: tests/golden/deploy/DEPLOYMENT.RUNTIME.METHOD.txt."""

from __future__ import annotations

import pytest

from dflash_trt import __version__
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.schema import Runtime
from tests.deploy.deployments import RUNTIMES, rendered, served_methods
from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "deploy"
LATENCY = "gpt-oss-120b.b300x8.latency"
CASES: list[tuple[str, Runtime, Method]] = [
    *((LATENCY, runtime, method) for runtime in RUNTIMES for method in served_methods(LATENCY)),
    *(("gpt-oss-120b.b300x8.nvfp4", runtime, "dflash") for runtime in RUNTIMES),
    ("gpt-oss-120b.b300x8.throughput-nvfp4", "trtllm", "dflash"),
    *(("gpt-oss-120b.h200x8.throughput", runtime, "dflash") for runtime in RUNTIMES),
    *(("qwen3-8b.h200x1.latency", runtime, method) for runtime in RUNTIMES for method in ("dflash", "eagle3")),
    *(("qwen3.8-27b.h200x1.latency", runtime, "mtp") for runtime in RUNTIMES),
]


def printed(name: str, runtime: Runtime, method: Method) -> str:
    """The text, without the version of the tool that wrote it."""
    return rendered(name, runtime, method).text.replace(__version__, "VERSION")


@pytest.mark.parametrize(("name", "runtime", "method"), CASES)
def test_text_is_frozen(name: str, runtime: Runtime, method: Method) -> None:
    """After a wanted change: python -m tests.deploy.test_golden"""
    assert printed(name, runtime, method) == (GOLDEN / f"{name}.{runtime}.{method}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{n}.{r}.{m}.txt" for n, r, m in CASES}


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / "{}.{}.{}.txt".format(*case)).write_text(printed(*case))
