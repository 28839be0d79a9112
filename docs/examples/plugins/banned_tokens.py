"""A logits processor: no answer contains the tokens of BANNED_TOKENS, as in BANNED_TOKENS=13,42."""

import os

BANNED = [int(token) for token in os.environ.get("BANNED_TOKENS", "").split(",") if token]


class BannedTokens:
    def process(self, logits, proposals):
        """Changes rows [K + 1, V] in place: the target's logits after the answer and each draft token."""
        logits[:, BANNED] = -float("inf")

    def advance(self, token_ids):
        """Takes the tokens of a step; this processor does not depend on them."""

    def forced(self):
        """Tokens that must come next: none."""
        return []


def processor(params, vocab_size):
    """Called for each request, with its SamplingParams; None leaves the request alone."""
    return BannedTokens() if BANNED else None
