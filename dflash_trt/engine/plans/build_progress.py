# SPDX-License-Identifier: Apache-2.0
"""Progress of TensorRT's builder as bars on a terminal, with Ctrl-C ending the build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def progress_monitor(trt: Any, title: str) -> Iterator[Any]:
    """An IProgressMonitor that draws a bar for each phase on stderr; KeyboardInterrupt where the user did."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        progress.add_task(title, total=None)
        monitor = make_monitor(trt, progress)
        yield monitor
    if monitor.is_stopped:
        raise KeyboardInterrupt


def make_monitor(trt: Any, progress: Progress) -> Any:
    """A class of its own for each module, because TensorRT must know the base class."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # pybind11 asks for it by name
            self._tasks: dict[str, TaskID] = {}
            self.is_stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            indent = "  " if parent_phase is None else "    "
            self._tasks[phase_name] = progress.add_task(f"{indent}{phase_name}", total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build: an interrupt must not raise through TensorRT's C++ frames."""
            try:
                progress.update(self._tasks[phase_name], completed=step + 1)
            except KeyboardInterrupt:
                self.is_stopped = True
            return not self.is_stopped

        def phase_finish(self, phase_name: str) -> None:
            progress.remove_task(self._tasks.pop(phase_name))

    return Monitor()
