# SPDX-License-Identifier: Apache-2.0
"""Arguments as the text of a command line, for vLLM and SGLang."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dflash_trt.files.command import argument, command_line

# Flags, not a file for vLLM's --config: findings/vllm_serve_drops_false_of_its_config_file.sh
COMMANDS = {"vllm": ("vllm", "serve"), "sglang": ("python", "-m", "sglang.launch_server")}
"""Programs that start a server."""
POSITIONAL = {"vllm": "model_tag"}
NEGATABLE = {"vllm"}  # every switch has a --no- form; SGLang's have none


def command_text(runtime: str, arguments: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    """The command, one argument a line; ConfigError for a value that it would not take as one.

    env sets the variables, so that the command is one also where no shell runs it.
    """
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    command = (*(["env", *variables] if variables else []), *COMMANDS[runtime])
    positional = [key for key in positional_keys(runtime) if key in arguments]
    lines = [command_line([*command, *(argument(arguments[key], key) for key in positional)])]
    for key, value in arguments.items():
        if key not in positional and (text := _flag(runtime, key, value)):
            lines.append(text)
    return " \\\n  ".join(lines) + "\n"


def flag_words(runtime: str, arguments: dict[str, Any]) -> list[str]:
    """The arguments as the words of flags."""
    return [word for key, value in arguments.items() for word in shlex.split(_flag(runtime, key, value))]


def positional_keys(runtime: str) -> list[str]:
    return [POSITIONAL[runtime]] if runtime in POSITIONAL else []


def _flag(runtime: str, key: str, value: object) -> str:
    name = f"--{key.replace('_', '-')}"
    if value is True:
        return name
    if value is False:
        return f"--no-{name[2:]}" if runtime in NEGATABLE else ""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return command_line([name, argument(text, key)])
