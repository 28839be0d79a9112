# SPDX-License-Identifier: Apache-2.0
"""Finds the commands of a shell script that start a server, through assignments, launchers and containers.

Quotes, comments, continued lines, here-documents, separators and simple variables are read as a shell reads them; what
only a running shell knows, such as $(nproc), stays as written. Expansion is bounded, as variables can double in size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.deploy.shell_words import ARRAY, ARRAY_END, Word, statements
from dflash_trt.errors import ConfigError

PROGRAMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.cli.main", "serve"),
        ("-m", "dynamo.vllm"),
    ),
    "sglang": (("-m", "sglang.launch_server"), ("sglang", "serve"), ("-m", "dynamo.sglang")),
    "trtllm": (
        ("trtllm-serve", "serve"),
        ("trtllm-serve",),
        ("-m", "dynamo.trtllm"),
        ("dflash_trt.trtllm", "dynamo.trtllm"),
    ),
}
"""Words that start a server of each runtime; Dynamo's workers take the arguments of theirs."""
IMAGES = {"vllm": re.compile(r"\S*vllm[^/\s]*(?::\S+|@\S+)?")}
"""Container images whose arguments are those of a server."""
IMAGE_PROGRAM = ("vllm", "serve")
"""Entry point of vLLM's image."""
CONTAINERS = ("docker", "podman", "nerdctl")
SHELLS = ("bash", "sh", "docker", "podman", "srun", "sudo", "singularity", "apptainer")
"""Programs that may run `bash -c COMMAND`."""
LAUNCHERS = {
    "docker", "podman", "nerdctl", "sudo", "srun", "env", "exec", "nohup", "time", "timeout", "uv", "uvx", "numactl",
    "nice", "taskset", "setsid", "stdbuf", "mpirun", "mpiexec", "torchrun", "singularity", "apptainer", "enroot",
    "conda", "poetry", "pixi", "bash", "sh", "python", "python3", "trtllm-llmapi-launch",
}  # fmt: skip
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
WHOLE_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})")
"""A word that is one variable: unquoted, its value is split into words; an array is several words in any case."""
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^}]*))?\})")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)(&?[^<>]*)")
LEADING = re.compile(r"if|then|elif|else|while|until|do|time|!|\{")
"""Words of the shell's grammar that stand before a simple command."""
SOURCE = ("source", ".")
OWN_WORDS = ("$@", "${@}")
"""The script's own arguments, known only when it is started."""
VALUED = {"-v", "--volume", "-e", "--env", "--name", "--mount", "-w", "--workdir", "--network", "--hostname", "--label"}
"""Flags of `docker run` whose value may look like an image."""
MAX_EXPANDED = 2**20
"""Characters that all variables of a script may expand to; files of up to 128 KiB are read."""
MAX_SHELLS = 8
"""Levels of `bash -c` within each other."""


class Server(msgspec.Struct, frozen=True):
    """A command of a script that starts a server."""

    runtime: str
    program: tuple[str, ...]
    """Words of PROGRAMS that start it."""
    words: list[str]
    """Arguments, variables expanded; plain `str` where they stand in a quoted command (bash -c)."""
    files: dict[str, str]
    """Texts that the script has written so far, by file name."""
    environment: dict[str, str]
    """Variables that the script, env or a container sets."""
    command: list[Word]
    """The whole command, from its launcher on."""
    sourced: tuple[str, ...] = ()
    """Scripts that the script has read so far (source FILE), which may set variables."""


class Variables:
    """Variables that a script has set so far, expanded up to a limit for the whole script."""

    def __init__(self, limit: int) -> None:
        """`limit` is the number of characters that all expansions together may have."""
        self.values: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self._limit = self._left = limit

    def expand(self, word: Word) -> Word:
        """`word` with variables that are set, or their defaults, in place; ConfigError beyond the limit."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            text = self.values.get(name, match[3] if match[3] is not None else match[0])
            self._spend(name, len(text))
            return text

        return Word(VARIABLE.sub(value, word), word.begin, word.end)

    def words(self, word: Word) -> list[Word]:
        """The words that the shell makes of one: several of an array, or of an unquoted variable with spaces."""
        whole = WHOLE_VARIABLE.fullmatch(word)
        name = whole and (whole[1] or whole[2])
        if name in self.arrays:
            self._spend(name, sum(map(len, self.arrays[name])))
            return [Word(each, word.begin, word.end) for each in self.arrays[name]]
        expanded = self.expand(word)
        is_unquoted = len(word) == word.end - word.begin
        if name in self.values and is_unquoted:
            return [Word(each, word.begin, word.end) for each in expanded.split()]
        return [expanded]

    def assign(self, match: re.Match[str], values: list[str] | None) -> None:
        """Set or extend (`+=`) a variable, with `values` an array."""
        name, is_added = match[1], bool(match[2])
        if values is not None:
            self.arrays[name] = [*(self.arrays.get(name, []) if is_added else []), *values]
        else:
            text = self.values.get(name, "") + match[3] if is_added else match[3]
            self._spend(name, len(text) if is_added else 0)
            self.values[name] = text

    def _spend(self, name: str | None, length: int) -> None:
        self._left -= length
        if self._left < 0:
            raise ConfigError(
                f"variable {name}: the script's variables expand to more than {self._limit} characters",
                hint=f"write what {name} stands for into the command",
            )


def servers(text: str, *, max_expanded: int = MAX_EXPANDED, max_shells: int = MAX_SHELLS) -> list[Server]:
    """Every server that a script starts.

    Raises ValueError for an open quote, ConfigError for variables or nested shells beyond the limits.
    """
    if not max_shells:
        raise ConfigError(
            f"expected at most {MAX_SHELLS} shells within each other (bash -c), found more",
            hint="write the inner command into a file of its own",
        )
    found = []
    variables = Variables(max_expanded)
    files: dict[str, str] = {}
    sourced: list[str] = []
    for words, documents in statements(text):
        filled = [each for word in words if word not in OWN_WORDS for each in variables.words(word)]
        for document in documents:
            files[_target(filled)] = variables.expand(document)
        while filled and LEADING.fullmatch(filled[0]):
            filled = filled[1:]
        if filled and filled[0] in SOURCE:
            sourced += filled[1:2]
        if filled and filled[0] in ("export", "declare", "local", "readonly"):
            filled = filled[1:]
        while filled and (assigned := ASSIGNMENT.fullmatch(filled[0])):
            values, filled = None, filled[1:]
            if assigned[3] == ARRAY and ARRAY_END in filled:
                values, filled = _array(filled)
            variables.assign(assigned, values)
        for server in started(_without_redirections(filled), max_shells=max_shells):
            environment = variables.values | server.environment
            read = (*sourced, *server.sourced)
            found.append(
                msgspec.structs.replace(server, files=files | server.files, environment=environment, sourced=read)
            )
    return found


def started(words: list[Word], *, max_shells: int = MAX_SHELLS) -> Iterator[Server]:
    """Each server that the words of a simple command start, by themselves or through a launcher or container."""
    if not words:
        return
    name = words[0].rpartition("/")[2]
    starts = range(len(words)) if name in LAUNCHERS or name.startswith("python") else range(1)
    for start in starts:
        for runtime, programs in PROGRAMS.items():
            for program in programs:
                base = (words[start].rpartition("/")[2], *words[start + 1 : start + len(program)])
                if base[: len(program)] == program:
                    arguments: list[str] = [*words[start + len(program) :]]
                    yield Server(runtime, program, arguments, {}, _assigned(words[:start]), words)
                    return
    if name in SHELLS:
        for index, word in enumerate(words[1:], 1):  # bash -c 'COMMAND'
            if words[index - 1].endswith("c") and words[index - 1].startswith("-") and " " in word:
                outer = _assigned(words[:index])
                for server in servers(word, max_shells=max_shells - 1):
                    plain = [str(each) for each in server.words]
                    yield msgspec.structs.replace(
                        server, words=plain, environment=outer | server.environment, command=words
                    )
                return
    if name in CONTAINERS and "run" in words:
        image = next((i for i, word in enumerate(words) if i > 1 and _is_image(words, i)), None)
        if image is not None:
            yield Server("vllm", IMAGE_PROGRAM, list(words[image + 1 :]), {}, _assigned(words[:image]), words)


def text_servers(text: str) -> list[Server]:
    """Every server that a text starts; none where it is YAML."""
    try:
        return servers(text)
    except ValueError:  # an open quote: an apostrophe
        return []


def _array(words: list[Word]) -> tuple[list[str], list[Word]]:
    """Words of an array up to its end, and those after it."""
    texts = list(map(str, words))
    end = texts.index(ARRAY_END)
    return texts[:end], words[end + 1 :]


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Variables that the words before a program set: of env, or of a container's --env."""
    matches = (ASSIGNMENT.fullmatch(word.removeprefix("--env=")) for word in words)
    return {match[1]: match[3] for match in matches if match is not None}


def _target(words: Sequence[str]) -> str:
    """File that a command with a here-document writes; empty if it writes none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in (">", ">>", "tee"):
            return following
        if word.startswith(">"):
            return word.lstrip(">")
    return ""


def _without_redirections(words: list[Word]) -> list[Word]:
    """The words that the program gets: not `> log`, `2>&1`."""
    # tree-sitter's grammar loses those that follow: findings/tree_sitter_bash_drops_words_after_a_redirection.sh
    kept, is_target = [], False
    for word in words:
        is_plain = len(word) == word.end - word.begin  # without quotes
        found = REDIRECTION.fullmatch(word) if is_plain and not is_target else None
        if found is None and not is_target:
            kept.append(word)
        is_target = found is not None and not found[1]
    return kept


def _is_image(words: Sequence[str], index: int) -> bool:
    """Whether a word is vLLM's image rather than the value of the flag before it."""
    before = words[index - 1]
    is_value = before.startswith("-") and "=" not in before and before in VALUED
    return not is_value and not words[index].startswith("-") and IMAGES["vllm"].fullmatch(words[index]) is not None
