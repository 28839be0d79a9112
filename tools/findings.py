# SPDX-License-Identifier: Apache-2.0
"""`python tools/findings.py [NAME]` runs the scripts of findings/ one after the other (`make findings`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

FINDINGS = Path(__file__).parents[1] / "findings"
SECONDS = 900  # three times what one may take on an idle machine
DIFFERENCE = re.compile(r"^\d+(?:,\d+)?[acd]\d+", re.MULTILINE)
"""A line of diff's normal output: the script ran, and printed something else than it did when it was written."""


def main(names: list[str]) -> int:
    """Prints each script's output, then a table; 1 unless every one behaves as it did, 2 for an unknown name."""
    scripts = {script.stem: script for script in sorted(FINDINGS.glob("*.sh"))}
    if unknown := [name for name in names if name not in scripts]:
        print(f"error: no findings/{unknown[0]}.sh; there are:", *scripts, sep="\n  ", file=sys.stderr)
        return 2
    rows = []
    for name in names or scripts:
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        verdict, output = run(scripts[name])
        print(output, flush=True)
        rows.append((name, f"{time.monotonic() - begin:.0f}", verdict))
    width = max(len(name) for name, _, _ in rows)
    print(f"{'script':{width}}  seconds  behaviour")
    for name, seconds, verdict in rows:
        print(f"{name:{width}}  {seconds:>7}  {verdict}")
    return int(any(verdict != "ok" for _, _, verdict in rows))


def run(script: Path, seconds: float = SECONDS) -> tuple[str, str]:
    """ok, changed, or why the script did not get that far; and what it printed."""
    command = ["bash", str(script)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the traps of the script remove its folder
        output, _ = process.communicate()
        return f"not seen: longer than {seconds:g} s", output
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if process.returncode == 0:
        return "ok", output
    return ("changed" if DIFFERENCE.search(output) else f"not seen: exit status {process.returncode}"), output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
