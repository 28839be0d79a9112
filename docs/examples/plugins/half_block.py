"""A draft-length policy: verify half of the block, and less the more requests run. `--draft-length half`."""

from dflash_trt.runtime.policy.draft_length import DraftLength


class HalfBlock(DraftLength):
    def __init__(self, num_draft_tokens):
        self._half = (num_draft_tokens + 1) // 2

    def choose(self, batch_size):
        """Draft tokens of the next step, 0 to num_draft_tokens."""
        return max(1, self._half // batch_size)

    def explain(self):
        return f"at most {self._half}, divided by the requests that run"
