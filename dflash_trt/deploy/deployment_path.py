# SPDX-License-Identifier: Apache-2.0
"""Names and paths of deployment files, shipped ones included."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.errors import ConfigError, EngineError
from dflash_trt.files.command import quoted
from dflash_trt.files.strict_yaml import closest
from dflash_trt.quantize.recipe import recipe_directory


def shipped_deployments() -> dict[str, Path]:
    """The deployment files that come with the package, by name."""
    files = {file.stem: file for file in recipe_directory().parent.glob("*.yaml")}
    return dict(sorted(files.items()))


def refuse_deployment(name: str | Path) -> None:
    """Raises EngineError where an engine directory is expected and `name` is a deployment, which runs elsewhere."""
    if (file := deployment_path(str(name))) is not None:
        runtime = (load_deployment(file).runtimes or ("trtllm",))[0]
        raise EngineError(
            f"{name} is a deployment, not an engine directory",
            hint=f"dflash-trt serve-config {quoted(Path(name))} --runtime {runtime}",
        )


def deployment_path(name: str) -> Path | None:
    """The deployment file that a command's argument names, by its path or as one that comes with the package.

    None for a checkpoint or an engine; what lies here comes before a shipped deployment of the same name. Raises
    ConfigError for a file that is nowhere, the beginning of shipped names, and a word that resembles one.
    """
    path, shipped = Path(name), shipped_deployments()
    is_file = path.suffix in (".yaml", ".yml")
    try:
        if path.exists():
            return path if is_file else None
    except OSError:  # no name of a file, too long for one
        return None
    stem = name.removesuffix(".yaml")
    if stem in shipped:
        return shipped[stem]
    if begun := [each for each in shipped if each.startswith(f"{stem}.")]:
        raise ConfigError(
            f"{name}: expected the whole name of a deployment, found the beginning of {len(begun)}",
            hint=f"one of {', '.join(begun)}",
        )
    near = closest(stem, shipped, "name")
    if is_file or (near and "/" not in name):
        raise ConfigError(
            f"{name}: neither a path here nor the name of a shipped deployment{near}",
            hint="dflash-trt serve-config --list",
        )
    return None
