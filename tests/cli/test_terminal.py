# SPDX-License-Identifier: Apache-2.0
"""What people see in terminals of 80 and 120 columns, letter for letter: tests/golden/terminal.txt.

After a change that is meant: python -c "from tests.cli.test_terminal import *; GOLDEN.write_text(on_a_terminal())".
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "terminal.txt"
COMMANDS = [
    ["inspect", "tests/fixtures/tiny-qwen3-dflash", "--target", "tests/fixtures/tiny-qwen3"],
    ["inspect", "tests/fixtures/tiny-qwen3", "--target", "tests/fixtures/tiny-qwen3-dflash"],
    ["inspect", "--catalog"],
    ["serve-config", "--list"],
    ["serve-config", "gpt-oss-120b.b300x8.latency", "--runtime", "trtllm"],
    ["tune", "gpt-oss-120b.b300x8.latency", "--slo", "500", "--tau", "4.7"],
    ["estimate", "gpt-oss-120b.b300x8.latency"],
    ["serve-config", "no-such-deployment", "--runtime", "trtllm"],
    ["bench", "report", "no-such-run", "-o", "report"],
]
SCRIPT = f"""
import fcntl, struct, sys, termios
from dflash_trt.cli import main
for width in (80, 120):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    for command in {COMMANDS!r}:
        print(f"{{width}}$ dflash-trt", *command, flush=True)
        sys.argv[1:] = command
        try:
            main()
        except SystemExit as end:
            print(f"[{{end.code or 0}}]", flush=True)
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_terminals() -> None:
    assert on_a_terminal() == GOLDEN.read_text()


def on_a_terminal() -> str:
    """What the commands print on a pseudo terminal, without colours."""
    ours, theirs = pty.openpty()
    settings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    settings |= {"TERM": "xterm", "PYTHONUTF8": "1", "HF_HOME": os.devnull}  # what a cache holds changes what is said
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY, env=settings) as process:
        os.close(theirs)
        printed = bytearray()
        while True:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        process.wait(60)
    os.close(ours)
    text = ESCAPE.sub("", printed.decode()).replace("\r\n", "\n")
    return text.replace(str(REPOSITORY), "REPOSITORY")
