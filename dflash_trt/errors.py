# SPDX-License-Identifier: Apache-2.0
"""Errors in words for the person who can fix them.

Every error is a plain sentence that names the thing and what is wrong with it; the hint is the next command to run.
"""

from __future__ import annotations

MAX_SHOWN = 200  # characters of a value that an error quotes


def printable(text: str) -> str:
    """`text` with control characters (ESC, carriage return, ...) as escapes; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def cut(text: str) -> str:
    """`text`, cut to the length that an error quotes."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first_line(error: Exception) -> str:
    """The first line of another library's message, cut where it is long."""
    return cut(str(error).partition("\n")[0])


def shown(value: object) -> str:
    """`value` as an error quotes it: on one line, cut where it is long."""
    return cut(repr(value))


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class DFlashError(Exception):
    """Base of every error that a user can fix; the command line prints it and exits with 1."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        """Both may quote files, so both are made printable."""
        super().__init__(printable(message))
        self.message = printable(message)
        self.hint = None if hint is None else printable(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class CheckpointError(DFlashError):
    """A draft or target checkpoint is incomplete, malformed or does not fit its partner."""


class UnreachableError(CheckpointError):
    """A repository is neither in the Hugging Face cache nor can it be fetched now."""


class BuildError(DFlashError):
    """An engine directory cannot be written."""


class ConfigError(DFlashError):
    """A deployment configuration is malformed, contradictory or does not fit the hardware it names."""


class RecipeError(DFlashError):
    """A quantisation recipe is malformed or does not fit the draft."""


class EngineError(DFlashError):
    """An engine directory cannot be used: something in it is missing, changed or of another version."""


class RequestError(DFlashError):
    """A prompt or a decoding setting cannot be served."""


class VerificationError(DFlashError):
    """A measured engine misses what was asked of it."""


class MissingDependencyError(DFlashError):
    """A command needs a package that is not installed."""


class PluginError(DFlashError):
    """A plug-in of another distribution cannot be loaded, or raises an error of its own."""


class RankError(DFlashError):
    """The processes that share one target do not fit together, or one of them has ended."""


class EndpointError(DFlashError):
    """A running server does not answer, or not as OpenAI's API does."""

    def __init__(self, message: str, *, hint: str | None = None, status: int | None = None) -> None:
        """`status` is that of the HTTP answer, where there was one."""
        super().__init__(message, hint=hint)
        self.status = status
