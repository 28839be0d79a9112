# SPDX-License-Identifier: Apache-2.0
"""Two processes that spin on one core: each waits while the other runs."""

from __future__ import annotations

import os
import subprocess
import sys

from dflash_trt.observe.servers.processor_time import ProcessorTime, processor_time
from tests.waiting import until

SPIN = "import os; os.sched_setaffinity(0, {%d}); os.fork()\nwhile True: pass"


def test_what_two_processes_use_and_wait_for() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN % min(os.sched_getaffinity(0))]) as process:
        until(lambda: processor_time(process.pid).used > 0.2)
        spent = processor_time(process.pid)
        subprocess.run(["pkill", "--parent", str(process.pid)], check=True)
        process.kill()
    assert spent.waited > 0.05
    until(lambda: processor_time(process.pid) == (0.0, 0.0))


def test_waits_of_threads_that_have_ended_do_not_count_below_zero() -> None:
    assert ProcessorTime(3.0, 1.0) - ProcessorTime(1.0, 2.0) == (2.0, 0.0)
