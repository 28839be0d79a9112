# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that the shell completes: a path, or a name that the command takes in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


class PathOrName(click.types.StringParamType):
    """A string; the shell completes the names that begin like it, and paths where none does."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # Bash drops what was listed before an item of the type "file".
        listed = [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *listed]


def _drafts() -> Iterable[str]:
    from dflash_trt.deploy.catalog import catalog

    return [draft.draft for draft in catalog().drafts]


def _targets() -> Iterable[str]:
    from dflash_trt.deploy.catalog import catalog

    return sorted({draft.target for draft in catalog().drafts})


def _deployments() -> Iterable[str]:
    from dflash_trt.deploy.deployment_file import shipped_deployments

    return shipped_deployments()


def _recipes() -> Iterable[str]:
    from dflash_trt.quantize.recipe import recipe_names

    return recipe_names()


DRAFT = PathOrName(_drafts)
TARGET = PathOrName(_targets)
CHECKPOINT = PathOrName(lambda: [*_drafts(), *_targets()])
DEPLOYMENT = PathOrName(_deployments)
DRAFT_OR_DEPLOYMENT = PathOrName(lambda: [*_drafts(), *_deployments()])
RECIPE = PathOrName(_recipes)
ENGINE_OR_URL = PathOrName(tuple)
