# SPDX-License-Identifier: Apache-2.0
"""Edits that a finding's fix names, as a user would make them; a text that is neither an edit nor known is an error."""

from __future__ import annotations

import copy
import re
import shlex
from typing import Any

import yaml

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.schema import Schema
from tests.deploy.broken.cases import REMOVED

NO_EDIT = (
    "look it up in the documents of your release", "check its keys by hand", "look up what it needs of model",
    "look for 'using the private ctx arena'", "use at least", "use larger GPUs", "compare with --recipe nvfp4-native",
    "lower max_batch_size or max_seq_len if the log says", "start it in the directory", "give --draft", "give --gpus",
    "give --target", "with such a release add", "write qwen3 there and keep attention_bias", "dflash-trt quantize",
    "serve it with vLLM or SGLang", "look at tau of the first run", "compare the keys with that release",
    "give a value to", "check it without SOURCE", "write whole numbers",
)  # fmt: skip
"""Beginnings of fixes that name no edit of the file: what to find out, or what to give the check."""
VALUES: dict[str, Any] = {
    "an integer": 8, "a number": 0.5, "true or false": False, "a string": "DFlash", "a mapping": {},
    "a directory": "/cache", "the requests that shall run at once": 64, "the number that is meant": 64,
    "speculative_model": "z-lab/gpt-oss-120b-DFlash", "model": "z-lab/gpt-oss-120b-DFlash", "max_draft_len": 9,
    "speculative_draft_model_path": "z-lab/gpt-oss-120b-DFlash", "num_speculative_tokens": 9, "max_seq_len": 32768,
    "speculative_draft_window_size": 64,
}  # fmt: skip
"""Value that a user chooses if the fix does not give one."""
STEP = {"at least": 0, "at most": 0, "more than": 1, "less than": -1}
Edit = tuple[str, Any]
"""Dotted key and value, REMOVED for none."""


def named_edits(finding: Finding, document: dict[str, Any], schema: Schema) -> list[list[Edit]]:
    """Alternatives, each a list of edits; none where the fix names no edit. ValueError for a text that is not known."""
    fix = re.split(r",? unless | \(not for |: without it ", finding.fix)[0]
    if fix.startswith(NO_EDIT):
        return []
    if fix in ("choose one of them", "add one of them", "choose one of them, or check that your release has it"):
        listed = re.search(r"expected one of (.*?)(?:, found|$)", finding.problem)
        assert listed is not None, finding
        return [[(finding.key, _value(word))] for word in listed[1].split(", ")]
    if finding.rule in ("unknown-key", "renamed-key"):
        renamed = _path(finding.key)
        new = [*renamed[:-1], fix.removeprefix("write ")]
        return [[(finding.key, REMOVED), (".".join(new), _get(document, renamed))]]
    if (given := re.fullmatch(r"give (.*)", fix)) and given[1] in VALUES:
        found = _get(document, _path(finding.key))
        return [[(finding.key, round(found) if isinstance(found, float) and found > 1 else VALUES[given[1]])]]
    if fix.startswith("write --"):
        arguments, findings = parse_arguments(shlex.split(fix.removeprefix("write ")), schema)
        assert not findings, findings
        return [list(arguments.items())]
    return [[_edit(finding, document, part)] for part in re.split(r",? or (?!false$)", fix)]


def _edit(finding: Finding, document: dict[str, Any], part: str) -> Edit:
    if part in ("remove it", "leave it out"):
        return finding.key, REMOVED
    if found := re.fullmatch(r"leave ([\w.]+) out", part):
        return found[1], REMOVED
    if found := re.fullmatch(r"give (at least|at most|more than|less than) (.+)", part):
        return finding.key, _value(found[2]) + STEP[found[1]]
    if found := re.fullmatch(r"add ([a-z_]+)(?: .*)?", part):
        outer = finding.key.rpartition(".")[0]
        return (f"{outer}.{found[1]}" if outer else found[1]), VALUES[found[1]]
    if found := re.fullmatch(r"(?:write|add) \{(\d+): (\d+), \.\.\.\}", part):
        most = int(found[2])
        kept = {at: min(most, length) for at, length in _get(document, _path(finding.key)).items()}
        return finding.key, kept | {int(found[1]): most}
    if found := re.fullmatch(r"(?:write|add) (.+)", part):
        return finding.key, _value(found[1])
    if part.isdigit():  # set it to 1 or 8
        return finding.key, int(part)
    if found := re.fullmatch(r"(?:lower to )?([\w.]+) (\d+)", part):
        return found[1], int(found[2])
    if found := re.fullmatch(r"(?:set |raise |lower )?(it|[\w.]+) (?:to|above) (.+)", part):
        key = finding.key if found[1] == "it" else found[1]
        return key, _value(found[2]) + 1 if " above " in part else _value(found[2])
    raise ValueError(f"no edit that is known, and not among NO_EDIT: {finding}")


def applied(document: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """A copy of the document, edited."""
    edited = copy.deepcopy(document)
    for key, value in edits:
        *outer, last = _path(key)
        place: Any = edited
        for each in outer:
            place = place[each] if isinstance(place, list) else place.setdefault(each, {})
        if value is REMOVED:
            place.pop(last, None)
        else:
            place[last] = value
    return edited


def _path(key: str) -> list[Any]:
    """'a.b[1]' -> ['a', 'b', 1]."""
    return [int(part) if part.isdigit() else part for part in re.split(r"[.\[]", key.replace("]", ""))]


def _get(document: Any, path: list[Any]) -> Any:
    for key in path:
        document = document[key] if isinstance(document, list) else document.get(key)
    return document


def _value(text: str) -> Any:
    return VALUES[text] if text in VALUES else yaml.safe_load(text)
