# SPDX-License-Identifier: Apache-2.0
"""`--set PREFIX.OPTION=VALUE`: settings of a cluster beside the runtime's own arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflash_trt.errors import ConfigError

OPTION = re.compile(r"([a-z]+(?:-[a-z]+)*)=(.+)", re.ASCII)


def split_settings(settings: Sequence[str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """Value by option of the settings that begin with `prefix` and a dot, and the other settings.

    Raises ConfigError for another form.
    """
    options, others = dict[str, str](), list[str]()
    for setting in settings:
        if not setting.startswith(f"{prefix}."):
            others.append(setting)
        elif match := OPTION.fullmatch(setting.removeprefix(f"{prefix}.")):
            options[match[1]] = match[2]
        else:
            raise ConfigError(f"--set {setting}: expected {prefix}.OPTION=VALUE")
    return options, others
