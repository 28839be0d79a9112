#!/usr/bin/env bash
# vLLM 0.33.0: `vllm serve --config FILE` drops every `key: false` of FILE, and --config=FILE is not opened at all.
#
# FlexibleArgumentParser.load_config_file turns `key: false` into --no-key only if the parser that reads the file
# knows that option. For `vllm serve` this is the top-level parser, whose options are the subcommands' names alone, so
# that `enable-prefix-caching: false` leaves prefix caching on. `no-enable-prefix-caching: true` works. The file is
# looked for by the word --config: joined by an equals sign it is parsed as an ordinary option that nothing reads.
#
# Expected: --no-enable-prefix-caching for `enable-prefix-caching: false`, and the same arguments from --config=FILE.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check pyyaml regex
"$directory/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$directory" vllm==0.33.0
python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("vllm/utils/argparse_utils.py", sys.argv[2])' \
  "$directory"/vllm-*.whl "$directory/wheel"

cat > "$directory/arguments.py" <<'PYTHON'
"""The wheel's argparse_utils.py with a parser of the structure of vllm/entrypoints/cli/main.py."""

import logging
import sys
from argparse import BooleanOptionalAction
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

folder = Path(sys.argv[1])
sys.modules["vllm"], sys.modules["vllm.logger"] = ModuleType("vllm"), ModuleType("vllm.logger")
sys.modules["vllm.logger"].init_logger = logging.getLogger
spec = spec_from_file_location("argparse_utils", folder / "wheel/vllm/utils/argparse_utils.py")
utils = module_from_spec(spec)
spec.loader.exec_module(utils)


def parsed(text: str, *words: str) -> dict[str, object]:
    (folder / "c.yaml").write_text(text)
    top = utils.FlexibleArgumentParser(prog="vllm")
    serve = top.add_subparsers().add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    serve.add_argument("--config")
    serve.add_argument("--enable-prefix-caching", action=BooleanOptionalAction, default=None)
    found = vars(top.parse_args(["serve", "model", *[word.format(folder / "c.yaml") for word in words]]))
    return {key: value for key, value in found.items() if key == "enable_prefix_caching"}


print("enable-prefix-caching: false   ", parsed("enable-prefix-caching: false\n", "--config", "{}"))
print("no-enable-prefix-caching: true ", parsed("no-enable-prefix-caching: true\n", "--config", "{}"))
print("the same, --config=FILE        ", parsed("no-enable-prefix-caching: true\n", "--config={}"))
PYTHON

seen=$("$directory/venv/bin/python" "$directory/arguments.py" "$directory")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
enable-prefix-caching: false    {'enable_prefix_caching': None}
no-enable-prefix-caching: true  {'enable_prefix_caching': False}
the same, --config=FILE         {'enable_prefix_caching': None}
SEEN
