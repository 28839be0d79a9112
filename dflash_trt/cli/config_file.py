# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: options of a command from a YAML file; the command line wins."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.strict_yaml import closest, read_yaml


def _read(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Makes the values of the file the defaults of the command's parameters."""
    if file is None:
        return
    document = read_yaml(file, ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: expected options and their values, found {shown(document)}", hint="port: 8000")
    known = {word.lstrip("-"): each for each in context.command.params for word in [*each.opts, each.name or ""]}
    defaults: dict[str, object] = {}
    for key, value in document.items():
        word = str(key).replace("_", "-")
        parameter = known.get(word) or known.get(str(key))
        if parameter is None or parameter.name is None:
            near = closest(word, [each for each in known if "_" not in each], "option")
            raise ConfigError(
                f"{file}: {context.command_path} has no option {shown(key)}{near}",
                hint=f"{context.command_path} --help lists its options",
            )
        defaults[parameter.name] = _value(value, parameter, f"{file}: {key}")
    context.default_map = defaults


def _value(value: object, parameter: click.Parameter, where: str) -> object:
    """The value as click takes it from a command line; of a mapping, KEY=VALUE for an option that may be repeated."""
    is_flag, may_repeat = (getattr(parameter, name, False) for name in ("is_flag", "multiple"))
    if may_repeat and isinstance(value, dict):
        value = [f"{key}={each}" for key, each in value.items()]
    values = value if isinstance(value, list) else [value]
    is_right = isinstance(value, bool) if is_flag else may_repeat or not isinstance(value, list)
    if not is_right or any(each is None or isinstance(each, dict | list) for each in values):
        expected = "true or false" if is_flag else "a list" if may_repeat else "a value"
        raise ConfigError(f"{where}: expected {expected}, found {shown(value)}")
    if not is_flag and any(isinstance(each, bool) for each in values):
        raise ConfigError(f"{where}: expected a value, found {str(value).lower()}", hint="quote a text: 'on'")
    return list(map(str, values)) if may_repeat else value if is_flag else str(value)


config_option = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), is_eager=True, expose_value=False, callback=_read,
    metavar="FILE", help="YAML file of these options, by their names (port: 8000); the command line wins.",
)  # fmt: skip
