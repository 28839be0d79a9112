# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.dashboards DIRECTORY` writes all dashboards and rules into it (`make dashboards`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from tools.dashboards.alerts import rules
from tools.dashboards.grafana import dashboard
from tools.dashboards.runtimes import RUNTIMES

HEADER = "# Written by `make dashboards` from tools/dashboards/. Metric names: {}.\n"


def files() -> dict[str, str]:
    """File name -> content."""
    texts = {}
    for name, runtime in RUNTIMES.items():
        texts[f"{name}.json"] = json.dumps(dashboard(name, runtime), indent=1) + "\n"
        body = yaml.safe_dump(rules(name, runtime), sort_keys=False, width=110, allow_unicode=True)
        texts[f"{name}.rules.yaml"] = HEADER.format(runtime.source) + body
    return texts


def main() -> None:
    """Writes them; says which."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.dashboards DIRECTORY")
    for name, text in files().items():
        path = Path(sys.argv[1]) / name
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
