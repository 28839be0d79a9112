#!/usr/bin/env bash
# llguidance 1.9.1: one refused token ends the matcher for good; rollback does not bring it back.
#
# consume_token and consume_tokens return False for a token that the grammar does not take, and leave the matcher in
# an error: from then on it takes nothing, validate_tokens says 0 and rollback returns False. validate_tokens counts
# what fits and try_consume_tokens takes it, both without an error. A verifier that feeds drafts until one is refused,
# and then rolls back, loses the constraint of the whole request.
#
# Expected: False and an unchanged matcher, as xgrammar has it; or that rollback restores the state before.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1

cat > "$directory/refused.py" <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A vocabulary of all bytes and one end token."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)
DRAFT = [*b"bbx"]  # the grammar below takes the first two
for method in ("validate_tokens", "try_consume_tokens", "consume_tokens"):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("ab*c"), log_level=0)
    assert matcher.consume_token(ord("a"))
    taken = getattr(matcher, method)(DRAFT)
    print(
        f"{method}: {taken}, error: {matcher.is_error()}, rollback(1): {matcher.rollback(1)},"
        f" then takes c: {matcher.validate_tokens([ord('c')])}"
    )
PYTHON

seen=$("$directory/venv/bin/python" "$directory/refused.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
validate_tokens: 2, error: False, rollback(1): True, then takes c: 0
try_consume_tokens: 2, error: False, rollback(1): True, then takes c: 1
consume_tokens: False, error: True, rollback(1): False, then takes c: 0
SEEN
