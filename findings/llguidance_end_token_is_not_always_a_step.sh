#!/usr/bin/env bash
# llguidance 1.9.1: consuming the end-of-sequence token is a step of the matcher only if the text could go on.
#
# After a text that the grammar could still extend, consume_token(end) counts as a step, and rollback(1) takes
# the end token back. After a complete text that cannot be extended (a choice, most JSON), consume_token(end)
# returns True as well, but is no step: rollback(1) then removes the last token of the text. Code that verifies
# a block of drafts and rolls back the rejected ones must count steps differently in the two cases.
#
# Expected: rollback(1) after an accepted end token removes the end token in both cases.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1

cat > "$directory/end.py" <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A vocabulary of all bytes and one end token."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)
for name, regex in (("can go on", "ab*"), ("is complete", "ab")):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(regex))
    taken = [matcher.consume_token(token) for token in (*b"ab", 256)]
    matcher.rollback(1)
    next_tokens = [bytes([token]) for token in b"ab" if matcher.validate_tokens([token])]
    print(f"{name}: accepted {taken}, after rollback(1) the grammar takes {next_tokens}"
          f" and {'an' if matcher.validate_tokens([256]) else 'no'} end token")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/end.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
can go on: accepted [True, True, True], after rollback(1) the grammar takes [b'b'] and an end token
is complete: accepted [True, True, True], after rollback(1) the grammar takes [b'b'] and no end token
SEEN
