# SPDX-License-Identifier: Apache-2.0
"""Structural tags, in the JSON that vLLM took over from xgrammar, as llguidance's Lark.

Special tokens in their texts are the tokens themselves: the same text in letters does not match. Free text has none,
except around triggered tags, where it may have those that are visible in an answer, as <think>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.json_schema import checked_schema
from dflash_trt.runtime.grammars.lark import grammar_to_lark, regex_to_lark

Json = dict[str, Any]
FREE_TEXT, SOME_TEXT = "/(?s:.*)/", "/(?s:.+)/"
MAX_REPEATS = 1000
PLACE = "x-place"
"""Field of a json_schema in which errors name the schema, where the tag itself was not given by a user."""


def structural_tag_to_lark(
    tag: Json, special_tokens: Mapping[str, int], visible: Set[str], vocab_size: int, field: str
) -> str:
    """llguidance's grammars for a structural tag.

    `special_tokens` are ids by text; the `visible` ones are not left out of an answer's text. Raises RequestError with
    the JSON pointer of a part that is malformed or not supported.
    """
    return _Writer(special_tokens, visible, vocab_size, field).grammars(tag)


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], visible: Set[str], vocab_size: int, field: str) -> None:
        self._special_tokens, self._visible = special_tokens, visible
        self._vocab_size, self._field = vocab_size, field
        longest_first = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._special_text = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        self._rules: list[str] = []
        self._grammars: list[Json] = []
        self._readers: dict[str, Callable[[Json, str], str]] = {
            "const_string": lambda f, p: self._text(self._get(f, "value", str, p)),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "token": lambda f, p: self._token(f.get("token"), p),
            "sequence": lambda f, p: self._joined(f, p, " "),
            "or": lambda f, p: self._joined(f, p, " | "),
            "optional": lambda f, p: f"({self._inner(f, 'content', p)})?",
            "star": lambda f, p: f"({self._inner(f, 'content', p)})*",
            "plus": lambda f, p: f"({self._inner(f, 'content', p)})+",
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "token_triggered_tags": self._token_triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammars(self, tag: Json) -> str:
        """JSON of the grammar and those that it uses."""
        if "structures" in tag:
            start = self._format(_from_structures(tag), "")
        else:
            start = self._format(tag.get("format"), "/format")
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def _refusal(self, pointer: str, problem: str) -> RequestError:
        return RequestError(f"{self._field}: {pointer or '/'} {problem}")

    def _get(self, form: Json, key: str, kind: type, pointer: str) -> Any:
        if not isinstance(value := form.get(key), kind):
            raise self._refusal(f"{pointer}/{key}", f"is no {kind.__name__}, but {shown(value)}")
        return value

    def _format(self, form: object, pointer: str) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(form, dict) or kind not in self._readers:
            raise self._refusal(f"{pointer}/type", f"is none of {', '.join(self._readers)}, but {shown(kind)}")
        if extra := {key for key, value in form.items() if value} - FIELDS[kind]:
            raise self._refusal(f"{pointer}/{min(extra)}", f"is not supported in {kind}")
        return self._readers[kind](form, pointer)

    def _inner(self, form: Json, key: str, pointer: str) -> str:
        return self._format(form.get(key), f"{pointer}/{key}")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _subgrammar(self, lark: str) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _text(self, text: str) -> str:
        """Lark of a text and the special tokens in it."""
        parts = [part for part in self._special_text.split(text) if part]
        ids = [f"<[{self._special_tokens[p]}]>" if p in self._special_tokens else json.dumps(p) for p in parts]
        return " ".join(ids) or '""'

    def _token(self, token: object, pointer: str) -> str:
        token_id = self._special_tokens.get(token) if isinstance(token, str) else token
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self._vocab_size:
            raise self._refusal(f"{pointer}/token", f"is no token id or special token of the target: {shown(token)}")
        return f"<[{token_id}]>"

    def _json_schema(self, form: Json, pointer: str) -> str:
        if form.get("style", "json") != "json":
            raise self._refusal(f"{pointer}/style", f"{shown(form['style'])} is not supported")
        schema = form.get("json_schema")
        if not isinstance(schema, dict):
            raise self._refusal(f"{pointer}/json_schema", f"is no JSON schema of an object, but {shown(schema)}")
        if place := form.get(PLACE):
            return f"%json {checked_schema(schema, f'{self._field}: {place}')}"
        return f"%json {checked_schema(schema, self._field, f'{pointer}/json_schema')}"

    def _regex(self, form: Json, pointer: str) -> str:
        pattern = self._get(form, "pattern", str, pointer)
        return self._subgrammar(regex_to_lark(pattern, f"{self._field}: {pointer}/pattern"))

    def _grammar(self, form: Json, pointer: str) -> str:
        text = self._get(form, "grammar", str, pointer)
        return self._subgrammar(grammar_to_lark(text, self._special_tokens, f"{self._field}: {pointer}/grammar"))

    def _any_text(self, form: Json, pointer: str) -> str:
        return f"({self._free_text(self._excludes(form, pointer))})?"

    def _excludes(self, form: Json, pointer: str) -> list[str]:
        excludes = form.get("excludes") or []
        if not isinstance(excludes, list) or not all(text and isinstance(text, str) for text in excludes):
            raise self._refusal(f"{pointer}/excludes", f"is no list of texts, but {shown(excludes)}")
        return excludes

    def _free_text(self, excludes: Iterable[str]) -> str:
        """Terminal of a text, not empty, in which none of `excludes` occurs.

        A rule must not allow two of them in a row: split between both, an excluded text would match.
        """
        name = f"T{len(self._rules)}"
        unwanted = " | ".join(json.dumps(text) for text in sorted({*excludes}))
        self._rules.append(f"{name}: {SOME_TEXT}{f' & ~({FREE_TEXT} ({unwanted}) {FREE_TEXT})' if unwanted else ''}")
        return name

    def _joined(self, form: Json, pointer: str, separator: str) -> str:
        elements = self._get(form, "elements", list, pointer)
        if not elements:
            raise self._refusal(f"{pointer}/elements", "is empty")
        parts = [self._format(element, f"{pointer}/elements/{i}") for i, element in enumerate(elements)]
        return f"({separator.join(parts)})"

    def _repeat(self, form: Json, pointer: str) -> str:
        least, most = self._get(form, "min", int, pointer), self._get(form, "max", int, pointer)
        if not 0 <= least <= (least if most == -1 else most) <= MAX_REPEATS:
            raise self._refusal(pointer, f"repeats {least} to {most} times; 0 to {MAX_REPEATS}, or -1 for max, can be")
        return f"({self._inner(form, 'content', pointer)}){{{least},{'' if most == -1 else most}}}"

    def _tags(self, form: Json, pointer: str) -> list[tuple[str, Json]]:
        tags = self._get(form, "tags", list, pointer)
        if not tags or not all(isinstance(tag, dict) and tag.get("type", "tag") == "tag" for tag in tags):
            raise self._refusal(f"{pointer}/tags", f"is no list of tags, but {shown(tags)}")
        return [(f"{pointer}/tags/{index}", {"type": "tag", **tag}) for index, tag in enumerate(tags)]

    def _tag(self, form: Json, pointer: str, trigger: str = "") -> str:
        """Lark of a tag; without its begin's `trigger`."""
        begin, content = form.get("begin"), form.get("content")
        start = self._text(begin[len(trigger) :]) if isinstance(begin, str) else self._end(begin, f"{pointer}/begin")
        if isinstance(content, dict) and content.get("type") == "any_text" and isinstance(form.get("end"), str):
            self._format(content, f"{pointer}/content")
            return f"{start} {self._text_until(form['end'], self._excludes(content, f'{pointer}/content'))}"
        body = self._format(content, f"{pointer}/content")
        ends = form.get("end")
        written = [self._end(end, f"{pointer}/end") for end in (ends if isinstance(ends, list) else [ends])]
        return f"{start} {body} ({' | '.join(written)})"

    def _end(self, end: object, pointer: str) -> str:
        if isinstance(end, str):
            return self._text(end)
        if isinstance(end, dict) and end.get("type") == "token":
            return self._token(end.get("token"), pointer)
        raise self._refusal(pointer, f"is no text or token, but {shown(end)}")

    def _text_until(self, text: str, excludes: Collection[str] = ()) -> str:
        """Lark of free text without `excludes` up to and with the first place of a text."""
        head = self._head(text)
        if head in self._special_tokens or not head:
            return f"({self._free_text([*excludes, head] if head else excludes)})? {self._text(text)}"
        before = f"({self._free_text(excludes)})?" if excludes else FREE_TEXT
        return f"{self._rule(f'{before} {json.dumps(head)}', '[lazy]')} {self._text(text[len(head) :])}"

    def _head(self, text: str) -> str:
        """The special token that a text begins with, or its letters up to the first one."""
        return next(filter(None, self._special_text.split(text)), "")

    def _triggered_tags(self, form: Json, pointer: str) -> str:
        triggers, by_trigger = self._get(form, "triggers", list, pointer), dict[str, list[str]]()
        for place, tag in self._tags(form, pointer):
            begin = self._get(tag, "begin", str, place)
            matching = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            if len(matching) != 1:
                raise self._refusal(f"{place}/begin", f"begins with {len(matching)} of the triggers; one is needed")
            by_trigger.setdefault(matching[0], []).append(self._tag(tag, place, matching[0]))
        heads, excludes = {*map(self._head, by_trigger)}, self._excludes(form, pointer)
        text, before = self._free_text([*excludes, *heads]), ""
        if visible := [str(self._special_tokens[token]) for token in self._visible - {*heads, *excludes}]:
            before = f"({text}? <[{','.join(visible)}]>)*"
        calls = [
            f"{before} {self._text_until(trigger, [*excludes, *heads - {self._head(trigger)}])} ({' | '.join(bodies)})"
            for trigger, bodies in by_trigger.items()
        ]
        return self._among_text(form, calls, f"{before} {text}?")

    def _token_triggered_tags(self, form: Json, pointer: str) -> str:
        calls = []
        for place, tag in self._tags(form, pointer):
            begin = self._get(tag, "begin", dict, place)
            if begin.get("token") not in self._get(form, "trigger_tokens", list, pointer):
                raise self._refusal(f"{place}/begin", "is none of the trigger_tokens")
            calls.append(f"{self._rule(FREE_TEXT)} {self._tag(tag, place)}")
        return self._among_text(form, calls, f"({self._free_text(())})?")

    def _among_text(self, form: Json, calls: list[str], text: str) -> str:
        """Lark of tags, each after free text, and of the `text` without or after them."""
        call = self._rule(" | ".join(calls))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else f"({call} | {text})"
        return f"{call}{'+' if form.get('at_least_one') else '*'} {text}"

    def _tags_with_separator(self, form: Json, pointer: str) -> str:
        separator = self._text(self._get(form, "separator", str, pointer))
        tag = self._rule(" | ".join(self._tag(tag, place) for place, tag in self._tags(form, pointer)))
        tags = tag if form.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return tags if form.get("at_least_one") else f"({tags})?"


TAGS = {"type", "tags", "at_least_one", "stop_after_first"}
FIELDS: dict[object, set[str]] = {
    "const_string": {"type", "value"},
    "json_schema": {"type", "json_schema", "style", PLACE},
    "regex": {"type", "pattern"},
    "grammar": {"type", "grammar", "syntax"},
    "any_text": {"type", "excludes"},
    "token": {"type", "token"},
    "sequence": {"type", "elements"},
    "or": {"type", "elements"},
    "optional": {"type", "content"},
    "star": {"type", "content"},
    "plus": {"type", "content"},
    "repeat": {"type", "content", "min", "max"},
    "tag": {"type", "begin", "content", "end"},
    "triggered_tags": {*TAGS, "triggers", "excludes"},
    "token_triggered_tags": {*TAGS, "trigger_tokens"},
    "tags_with_separator": {*TAGS, "separator"},
}
"""Fields of each format that are supported."""


def _from_structures(tag: Json) -> Json:
    """The older form of a structural tag, a list of begin, schema and end."""
    structures, tags = tag["structures"], []
    for structure in structures if isinstance(structures, list) else []:
        given = structure if isinstance(structure, dict) else {}
        content = {"type": "json_schema", "json_schema": given.get("schema")}
        tags.append({"begin": given.get("begin"), "content": content, "end": given.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
