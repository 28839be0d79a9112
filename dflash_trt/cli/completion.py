# SPDX-License-Identifier: Apache-2.0
"""Argument types that the shell completes: paths, names that stand for them, and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from dflash_trt.deploy.catalog import catalog
from dflash_trt.deploy.deployment_file import shipped_deployments
from dflash_trt.deploy.gpus import known_gpus
from dflash_trt.quantize.recipe import recipe_names


class PathOrName(click.types.StringParamType):
    """A string; the shell completes the names that begin like it, and paths where none does."""

    def __init__(self, names: Callable[[], Iterable[str]], name: str = "ID|DIR") -> None:
        self.names, self.name = names, name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # Bash drops what was listed before an item of the type "file".
        listed = [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *listed]


class GpusType(click.types.StringParamType):
    """GPUs and their count, b300x8; the shell completes each known GPU, one, and doubled up to a node of them."""

    name = "gpus"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = (
            f"{gpu.name}x{2**power}" for gpu in known_gpus().values() for power in range(gpu.gpus_per_node.bit_length())
        )
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _drafts() -> list[str]:
    return [known.draft for known in catalog().drafts]


def _targets() -> list[str]:
    return sorted({known.target for known in catalog().drafts})


DRAFT = PathOrName(_drafts)
TARGET = PathOrName(_targets)
CHECKPOINT = PathOrName(lambda: [*_drafts(), *_targets()])
DEPLOYMENT = PathOrName(shipped_deployments)
SOURCE = PathOrName(lambda: [*shipped_deployments(), *_drafts(), *_targets()])
DRAFT_OR_DEPLOYMENT = PathOrName(lambda: [*_drafts(), *shipped_deployments()])
RECIPE = PathOrName(recipe_names, "NAME|FILE")
GPUS = GpusType()
ENGINE_OR_URL = PathOrName(tuple)
