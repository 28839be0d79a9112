# SPDX-License-Identifier: Apache-2.0
"""Servers in the containers of Kubernetes manifests (Deployments, LeaderWorkerSets, Dynamo's graphs) and Compose files.

Every mapping with an image or a command is taken for a container, at whatever depth the kind has it. References to
variables of the container itself are filled in, $(NAME) in Kubernetes and ${NAME} in Compose.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.finding import UNCHECKED, Finding
from dflash_trt.deploy.script import IMAGE_PROGRAM, IMAGES, Server, started
from dflash_trt.deploy.shell_words import Word
from dflash_trt.errors import ConfigError, cut, shown

REFERENCE = {
    "Kubernetes": re.compile(r"\$\(([A-Za-z_]\w*)\)"),
    "Compose": re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))"),
}
ELSEWHERE = {
    "env_file": "variables of", "envFrom": "variables of", "extends": "what comes from", "include": "what comes from",
}  # fmt: skip
"""Keys of a container that bring in other files or objects."""


class Found(msgspec.Struct, frozen=True):
    """A server of a manifest."""

    server: Server
    findings: list[Finding]
    """Parts of its container that are not read."""


def manifest_kind(document: object) -> str | None:
    """Kubernetes or Compose, where a YAML document is a manifest."""
    if not isinstance(document, dict):
        return None
    if {"apiVersion", "kind"} <= document.keys():
        return "Kubernetes"
    services = document.get("services")
    return (
        "Compose" if isinstance(services, dict) and any(isinstance(each, dict) for each in services.values()) else None
    )


def manifest_servers(documents: list[Any], file: Path) -> list[Found]:
    """Each server that the containers of a file's documents start; ConfigError, naming what was found, if none does."""
    files = _config_maps(documents)
    containers = [(kind, each) for each in documents if (kind := manifest_kind(each)) for each in _containers(each)]
    found = [each for kind, container in containers for each in _servers(container, kind, files)]
    if found:
        return found
    images = sorted({str(each["image"]) for _, each in containers if "image" in each})
    what = f"containers of {cut(', '.join(images))}, none with a command that starts one" if images else "no container"
    kinds = ", ".join(sorted({str(each.get("kind", "Compose file")) for each in documents if isinstance(each, dict)}))
    raise ConfigError(
        f"{file}: expected a container that starts a server, found {what} ({shown(kinds)[1:-1]})",
        hint="give the container's command and arguments, or check the files that it is started with",
    )


def _config_maps(documents: list[Any]) -> dict[str, str]:
    """Texts of all ConfigMaps by the base names under which they are mounted."""
    maps = [each for each in documents if isinstance(each, dict) and each.get("kind") == "ConfigMap"]
    data = [each["data"] for each in maps if isinstance(each.get("data"), dict)]
    return {str(name): text for each in data for name, text in each.items() if isinstance(text, str)}


def _containers(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for each in value:
            yield from _containers(each)
    elif isinstance(value, dict):
        if isinstance(value.get("image"), str) or isinstance(value.get("command"), (list, str)):
            yield value
        for each in value.values():
            yield from _containers(each)


def _servers(container: dict[str, Any], kind: str, files: dict[str, str]) -> Iterator[Found]:
    environment = _environment(container)
    entry_key, arguments_key = ("command", "args") if kind == "Kubernetes" else ("entrypoint", "command")
    parts = [_words(container.get(key), kind, environment) for key in (entry_key, arguments_key)]
    words = [word for part in parts for word in part]
    found = list(started(words))
    if not found and not parts[0] and IMAGES["vllm"].fullmatch(str(container.get("image"))):
        found = [Server("vllm", IMAGE_PROGRAM, [*words], {}, {}, words)]
    unread = [
        Finding("container", UNCHECKED, key, f"{what} {cut(str(container[key]))}", "look whether they set an argument")
        for key, what in ELSEWHERE.items()
        if container.get(key)
    ]
    for server in found:
        plain = [str(word) for word in server.words]
        yield Found(
            msgspec.structs.replace(
                server, words=plain, files=files | server.files, environment=environment | server.environment
            ),
            unread,
        )


def _environment(container: dict[str, Any]) -> dict[str, str]:
    """Variables with a value of their own: a list of name and value, NAME=VALUE words, or a mapping."""
    found = container.get("env", container.get("environment"))
    if isinstance(found, dict):
        return {str(name): str(value) for name, value in found.items() if isinstance(value, (str, int, float))}
    variables: dict[str, str] = {}
    for each in found if isinstance(found, list) else []:
        if isinstance(each, str) and "=" in each:
            name, _, variables[name] = each.partition("=")
        elif isinstance(each, dict) and isinstance(each.get("value"), (str, int, float)):
            variables[str(each.get("name"))] = str(each["value"])
    return variables


def _words(value: object, kind: str, environment: dict[str, str]) -> list[Word]:
    """Words of a command, a list or, in Compose, also one line."""
    try:
        parts = shlex.split(value) if isinstance(value, str) else value
    except ValueError as problem:  # an open quote
        raise ConfigError(f"the command {shown(value)}: {problem}") from None

    def filled(match: re.Match[str]) -> str:
        name, otherwise = match[1] or match[3], match[2] if kind == "Compose" else None
        return environment.get(name, f"${{{name}}}" if otherwise is None else otherwise)

    texts = [REFERENCE[kind].sub(filled, str(part)) for part in (parts if isinstance(parts, list) else [])]
    return [Word(text.replace("$$", "$"), 0, len(text)) for text in texts]
