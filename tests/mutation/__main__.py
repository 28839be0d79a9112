# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.mutation COUNT DIRECTORY READER...`: a process for each reader, 5 s and 500 MB for each mutation.

Prints a line of counts for each and exits with 0, or shows the first mutation that did not end in our own error.
"""

import contextlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import click

from dflash_trt.errors import DFlashError
from tests.mutation.readers import READERS

SECONDS = 5
"""Processor time, so that a busy machine changes nothing."""
PATIENCE = 120
"""Seconds, for what waits and computes nothing."""
BYTES = 500_000_000


class TooSlow(BaseException):
    """A mutation used up its time."""


def main(count: int, directory: Path, names: list[str]) -> int:
    """The first exit code that is not 0."""
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)
    for name in names:
        if (undamaged := _run(name, directory, Random(0))) != "loaded":  # it also imports what it needs
            print(f"{name}: expected the undamaged file to load, found it {undamaged}")
            return 2
    return next(filter(None, (_forked(name, count, directory) for name in names)), 0)


def _forked(name: str, count: int, directory: Path) -> int:
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        code = 70
        try:
            code = mutate(name, count, directory)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mutate(name: str, count: int, directory: Path) -> int:
    """The exit code for one reader."""
    reader = READERS[name]
    file = directory / reader.file
    good = file.read_bytes()
    outcomes: Counter[str] = Counter()
    slowest = 0.0  # in seconds of the processor
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
    for seed in range(count):
        rng = Random(f"{name} {seed}")
        file.write_bytes(reader.mutate(good, rng))
        begin = time.process_time()
        try:
            outcomes[_run(name, directory, rng)] += 1
        except (Exception, TooSlow):
            traceback.print_exc()
            print(f"{name}, mutation {seed}, kept at {file}: expected facts or our own error, found the above")
            return 1
        slowest = max(slowest, time.process_time() - begin)
    file.write_bytes(good)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{name}: {count} mutations, {dict(sorted(outcomes.items()))}, slowest {slowest:.2f} s, peak {peak} MiB")
    return 0 if outcomes["refused"] > count // 4 else 2  # otherwise the mutations do not reach the reader


def _run(name: str, directory: Path, rng: Random) -> str:
    """ "loaded" or "refused"; raises what is neither, and for an output that a terminal would obey."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            READERS[name].read(directory, rng)
        return _checked("loaded", _text(output))
    except DFlashError as error:
        return _checked("refused", f"{error}{_text(output)}")
    except click.UsageError:  # a draft that has become a target, and takes no --target
        return "refused"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _checked(outcome: str, said: str) -> str:
    if wrong := next((c for c in said if not c.isprintable() and c != "\n"), None):
        raise ValueError(f"expected printable words, found {wrong!r} in {said[-500:]!r}")
    if len(said) > 4_000_000:
        raise ValueError(f"expected at most a table of long names, found {len(said)} characters")
    return outcome


def _text(output: io.TextIOWrapper) -> str:
    output.seek(0)
    return output.read()


def _stop(*_: object) -> None:
    raise TooSlow


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
