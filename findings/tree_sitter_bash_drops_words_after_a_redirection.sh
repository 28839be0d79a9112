#!/usr/bin/env bash
# tree-sitter-bash 0.25.1 (tree-sitter 0.26.0): words that follow a redirection are attached to the redirection.
#
# Bash passes every word of a simple command to the program, wherever the redirection stands. The grammar
# parses the words after `> file` as further destinations of the redirection, and reports no error. A tool that
# collects the arguments of a command node therefore loses options that stand after `> log` or `2>&1`.
#
# Expected: the arguments [serve, model, --port, 8000] for both commands, or an error node.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check tree-sitter==0.26.0 tree-sitter-bash==0.25.1

cat > "$directory/arguments.py" <<'PYTHON'
import subprocess

import tree_sitter_bash
from tree_sitter import Language, Parser

parser = Parser(Language(tree_sitter_bash.language()))


def parsed(line: str) -> tuple[list[str], bool]:
    """The arguments of the command node, and whether the tree reports an error."""
    root = parser.parse(line.encode()).root_node
    nodes, commands = [root], []
    while nodes:
        node = nodes.pop()
        if node.type == "command":
            commands.append(node)
        nodes += node.children
    words = [child.text.decode() for child in commands[0].children_by_field_name("argument")]
    return words, root.has_error


def passed_by_bash(line: str) -> list[str]:
    """The arguments that bash passes to the same command, here a function that prints them."""
    script = f'server() {{ printf "%s\\n" "$@" >&3; }}; {{ {line}; }} 3>&1 >/dev/null 2>&1'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


for line in ("server serve model --port 8000 > /dev/null", "server serve model > /dev/null --port 8000",
             "server serve 2>&1 model --port 8000"):
    words, has_error = parsed(line)
    print(f"{line}\n  tree: {words}, error: {has_error}\n  bash: {passed_by_bash(line)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/arguments.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
server serve model --port 8000 > /dev/null
  tree: ['serve', 'model', '--port', '8000'], error: False
  bash: ['serve', 'model', '--port', '8000']
server serve model > /dev/null --port 8000
  tree: ['serve', 'model'], error: False
  bash: ['serve', 'model', '--port', '8000']
server serve 2>&1 model --port 8000
  tree: ['serve'], error: False
  bash: ['serve', 'model', '--port', '8000']
SEEN
