# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve` as a process of its own on a free loopback port, which ends with the block that uses it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import EndpointError
from dflash_trt.files.read import read_bytes
from dflash_trt.observe.bench.child_process import child_process

SERVING = re.compile(r"^serving .* on (http://\S+)$", re.MULTILINE)
START_SECONDS = 3600  # a large target on a slow disk
MAX_LOG_BYTES = 2**20  # until it serves
MODEL = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """How one is started."""

    engine: Path
    target: str | None
    """None: the one that the engine was built for."""
    draft_length: str | None
    """Value of `--draft-length`; "0" decodes plainly."""
    max_batch_size: int | None = None
    dtype: str | None = None

    def words(self) -> list[str]:
        """The command's, without the program."""
        words = ["serve", str(self.engine), "--served-model-name", MODEL]
        words.append("--no-enable-prefix-caching")  # prompts return at every point, and would be found from the second
        for name in ("target", "draft_length", "max_batch_size", "dtype"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's URL once it serves; raises EndpointError with its output where it does not."""
        with tempfile.NamedTemporaryFile(prefix="dflash-trt-serve-", suffix=".log") as log:
            command = [sys.executable, "-m", "dflash_trt", *self.words(), "--port", "0", "--drain-seconds", "0"]
            with child_process(command, log.fileno()) as process:
                yield _url(process, Path(log.name))


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        text = read_bytes(log, EndpointError, limit=MAX_LOG_BYTES).decode(errors="replace")
        if serving := SERVING.search(text):
            return serving[1]
        if is_over:
            raise EndpointError(f"dflash-trt serve did not start: {text.strip() or 'no message'}")
        time.sleep(0.1)
    raise EndpointError(f"dflash-trt serve was still loading after {START_SECONDS} s")
