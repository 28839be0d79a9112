# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, in words for the person who can fix it.

Every error says what was expected, what was found and where; the hint is the next command to run.
"""

from __future__ import annotations


class DFlashError(Exception):
    """Base of every error that a user can fix; the command line prints it and exits with 1."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class CheckpointError(DFlashError):
    """A draft or target checkpoint is incomplete, malformed or does not fit its partner."""


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
    """An engine was measured, and it does not hold what was asked of it."""


class MissingDependencyError(DFlashError):
    """A command needs a package that is not installed."""


class RankError(DFlashError):
    """The processes that share one target do not fit together, or one of them has ended."""
