#!/usr/bin/env bash
# llguidance 1.9.1: JSON that is valid for the schema is refused if it is spelt in another way than the grammar's.
#
# Strings may not hold \u escapes of printable characters nor "\/", so what json.dumps writes for an accented letter
# is refused at its third hexadecimal digit. 1e5 is a number, but not one with a minimum; 1.0 is no integer. Required
# keys that "properties" does not name come after those that it does. Drafts and jump-ahead text taken from real JSON
# (prompts, tool results) stop matching there.
#
# Expected: every spelling that a JSON Schema validator accepts; at most the order of the keys is fixed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0

cat > "$directory/spelling.py" <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A vocabulary of all bytes and one end token."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)
STRING, NUMBER = {"type": "string"}, {"type": "number"}
KEYS = {"type": "object", "properties": {"b": NUMBER}, "required": ["a", "b"]}
CASES = [
    (STRING, json.dumps("é", ensure_ascii=False)),
    (STRING, json.dumps("é")),
    (STRING, r'"a\/b"'),
    (STRING, r'"\u000a"'),
    (NUMBER, "1e5"),
    (NUMBER | {"minimum": 0}, "1e5"),
    (NUMBER | {"minimum": 0}, "100000.0"),
    ({"type": "integer"}, "1.0"),
    (KEYS, '{"b": 1, "a": 2}'),
    (KEYS, '{"a": 2, "b": 1}'),
]
for schema, text in CASES:
    jsonschema.validate(json.loads(text), schema)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    taken = matcher.validate_tokens([*text.encode()])
    verdict = "taken" if taken == len(text.encode()) else f"refused after {text.encode()[:taken].decode()}"
    print(f"{json.dumps(schema)}: {text}: {verdict}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/spelling.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
{"type": "string"}: "é": taken
{"type": "string"}: "\u00e9": refused after "\u00
{"type": "string"}: "a\/b": refused after "a\
{"type": "string"}: "\u000a": taken
{"type": "number"}: 1e5: taken
{"type": "number", "minimum": 0}: 1e5: refused after 1
{"type": "number", "minimum": 0}: 100000.0: taken
{"type": "integer"}: 1.0: refused after 1
{"type": "object", "properties": {"b": {"type": "number"}}, "required": ["a", "b"]}: {"b": 1, "a": 2}: taken
{"type": "object", "properties": {"b": {"type": "number"}}, "required": ["a", "b"]}: {"a": 2, "b": 1}: refused after {"
SEEN
