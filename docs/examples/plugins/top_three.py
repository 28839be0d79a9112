"""An acceptance rule: a draft is accepted if it is among the target's three best. `--acceptance-rule top-3`.

Such a rule is lossy: the answer then depends on the draft.
"""


def accepts(logits, proposal):
    """Whether the draft token is accepted, by the target's logits [V] in its place."""
    return (logits > logits[proposal]).sum() < 3
