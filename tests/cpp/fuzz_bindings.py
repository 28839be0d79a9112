# SPDX-License-Identifier: Apache-2.0
"""Calls every function of `_C` with wrong dtypes, shapes, strides, ids and numbers; each returns or raises.

    python -m tests.cpp.fuzz_bindings SEED CALLS

Memory named by an address is the caller's word, so sizes that go with an address are made negative or too large for
another reason than memory. The attention itself tells arbitrary addresses and page ids from its caller's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from dflash_trt import _C
from tests.plugins.cases import Case
from tests.plugins.tensors import draw, inputs

INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 31, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
LISTS: list[list[int]] = [[], [1], [-1], [2**40]]
NUMBERS = (*INTEGERS, 0.5, 1e-30, 1e30, float("nan"), float("inf"), None, "best", "none", *LISTS)
DTYPES = (
    torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
)  # fmt: skip
REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError, OverflowError, BufferError, IndexError)
CASE = Case(name="fuzz", S=2, N=4, G=2, D=64, L=2, layer=1, C_max=9, slots=3, context_lengths=(9, 4), sinks=True,
            bias=True)  # fmt: skip
ATTRIBUTES = CASE.attributes()

Arguments = dict[str, Any]


def random_tensor(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shape = [rng.choice((0, 1, 2, 3, 16, 48)) for _ in range(rng.choice((0, 1, 2, 3, 5, 9)) % 6)]
    return torch.zeros(shape, dtype=dtype)


def changed_tensor(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another dtype, rank, shape or stride, or with other values."""
    dtypes = [dtype for dtype in DTYPES if dtype != tensor.dtype]
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.to(rng.choice(dtypes)),
        lambda: tensor[None],
        lambda: tensor.flatten()[0] if tensor.numel() else tensor,
        lambda: random_tensor(rng, rng.choice(dtypes)),
        lambda: random_tensor(rng, tensor.dtype),
        lambda: tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor.repeat_interleave(2)[::2],
        lambda: tensor[: len(tensor) // 2] if tensor.ndim else tensor,
        lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor,
        lambda: tensor.expand(2, *tensor.shape),
        lambda: extreme_values(rng, tensor),
        lambda: (
            torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape) if tensor.numel() else tensor
        ),
    ]
    return rng.choice(changes)()


def extreme_values(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    filled = tensor.clone()
    value = (
        rng.choice((-1, 0, 3, 127)) if tensor.dtype == torch.uint8 or not tensor.is_floating_point() else float("nan")
    )
    if tensor.dtype in (torch.int32, torch.int64) and rng.random() < 0.5:
        value = rng.choice((torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max))
    return filled.fill_(value % 256 if tensor.dtype == torch.uint8 else value)


def changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        key = rng.choice(list(value))
        return value | {key: changed(rng, value[key])}
    if rng.random() < 0.1:
        return rng.choice(NUMBERS)
    if isinstance(value, torch.Tensor):
        return changed_tensor(rng, value)
    if isinstance(value, list | tuple) and value:
        items = list(value)
        items[rng.randrange(len(items))] = rng.choice(INTEGERS)
        return rng.choice((items, items[1:], items * 2))
    return rng.choice(NUMBERS)


def attend(**values: Any) -> None:
    """PassRows.attend with what no memory can satisfy."""
    shape, window = values["shape"], values["window"]
    if tuple(shape) == (4, 2, 8, 8, 4) and window == 0 and values["pages"] == [[0], [3, 1]]:
        return
    sizes = [*shape, window]
    if (
        all(isinstance(size, int) for size in sizes)
        and len(sizes) == 6
        and min(sizes[:5]) >= 1
        and sizes[0] % sizes[1] == 0
    ):
        values["shape"] = (*sizes[:4], 0)  # no cache has the pages, whatever they are
    rows = _C.PassRows(values["begins"], values["num_tokens"], values["pages"])
    nowhere = (0, 0, 0)
    rows.attend(nowhere, nowhere, nowhere, 0, 0, 0, values["shape"], False, 1.0, 0.0, window, 0, 1, 0, values["isa"])


def linear(function: Callable[..., None], **sizes: Any) -> None:
    """Without rows, unless another size is below 0: the addresses are none."""
    counts = sizes["counts"]
    if min(sizes["num_outputs"], sizes["num_inputs"]) >= 0 and all(count >= 0 for count in counts):
        counts = [0] * len(counts)
    function(0, counts, 0, sizes["num_outputs"], sizes["num_inputs"], 0, 0, 1, 0, sizes["isa"])


def kv_injection(
    function: Callable[..., Any], attributes: Arguments, tensors: Arguments, out: Any, **others: Any
) -> None:
    given = list(tensors.values())
    function(_C.KVInjectionAttributes(**attributes), given, out, **others)


def verify_block(params: Arguments, **others: Any) -> None:
    _C.verify_block(params=_C.SamplerParams(**params), **others)


def answer(params: Arguments, prompt_ids: Any, max_tokens: Any, stop_ids: Any) -> _C.Answer:
    return _C.Answer(_C.SamplerParams(**params), prompt_ids, max_tokens, stop_ids)


def accept_rows(own: Arguments, proposals: Any, **others: Any) -> None:
    _C.accept_rows(answers=[answer(**own)], proposals=[tuple(proposals.values())], **others)


def accept_chosen(proposals: Any, **others: Any) -> None:
    _C.accept_chosen(proposals=[tuple(proposals.values())], **others)


def append_all(
    own: Arguments, proposals: Any, accepted: Any, time: Any, begin: Any, cut: Any, lengths: Any, vocab: Any,
    others: Any,
) -> None:  # fmt: skip
    grown = answer(**own)
    _C.append_all([grown], [tuple(proposals.values())], accepted, time)
    grown.table_of_counts(vocab, others)
    grown.token_ids(begin)
    grown.passes(begin)
    grown.cut(cut)
    _C.next_blocks([grown], lengths)
    _C.last_passes([grown])


def draft_counts(proposals: Any, accepted: Any) -> None:
    _C.draft_counts([tuple(proposals.values())], accepted)


def token_probabilities(params: Arguments, **others: Any) -> None:
    _C.token_probabilities(params=_C.SamplerParams(**params), **others)


def calls() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Every function with arguments that it takes."""
    tensors = draw(CASE)
    node = inputs(CASE, tensors)
    out = torch.empty_like(tensors.q)
    params = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
              "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3}  # fmt: skip
    ids = torch.tensor([1, 2, 3])
    logits = torch.randn(3, 48)
    rows, cache = torch.randn(4, 2, 2, 2, 16), torch.zeros(3, 2, 9, 2, 16)
    append = {"kv": rows, "page_ids": ids.int().new_zeros(4), "offsets": ids.int().new_ones(4),
              "k_cache": cache, "v_cache": cache.clone()}  # fmt: skip
    packing = {"weights": torch.randn(3, 48), "threads": 2}
    call = {"attributes": ATTRIBUTES, "tensors": node, "out": out}
    columns = {"counts": [0, 0], "num_outputs": 8, "num_inputs": 8, "isa": "best"}
    proposed = {"candidate_ids": torch.tensor([[1, 2], [3, 4]]),
                "probabilities": torch.full((2, 2), 0.5, dtype=torch.float64)}  # fmt: skip
    history = {"prompt_ids": ids, "output_ids": ids[:0]}

    own = {"params": params, "prompt_ids": [1, 2, 3], "max_tokens": 9, "stop_ids": [7]}
    drafted = {"token_ids": [1, 3], **proposed, "survival": None, "is_forced": False}
    row_counts = {"num_rows": [3], "num_skipped": [0], "proposals": drafted}

    def bound(function: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **values: function(inner, **values)

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    nvfp4 = {"scale_2": 0.1, "out_data": codes(3, 24), "out_scales": codes(3, 3)}
    int4 = {"weights": torch.randn(4, 64), "threads": 2, "out_data": codes(2, 64), "out_scales": torch.zeros(4, 2)}
    launch = {"workspace": out, "stream": 0, "host_slot_ids": [0, 1], "host_context_lengths": [9, 4], "kernel": "best"}
    rows_of_pass = {"begins": [0, 33], "num_tokens": [1, 2], "pages": [[0], [3, 1]], "shape": (4, 2, 8, 8, 4),
                    "window": 0, "isa": "best"}  # fmt: skip
    probabilities = torch.zeros(48, dtype=torch.float64)
    return {
        "amax": (_C.amax, packing),
        "pack_fp8": (_C.pack_fp8, packing | {"scale": 0.1, "out": codes(3, 48)}),
        "pack_nvfp4": (_C.pack_nvfp4, packing | nvfp4),
        "pack_int4": (_C.pack_int4, int4),
        "philox4x32": (_C.philox4x32, {"counter": [1, 2, 3, 4], "key": [1, 2]}),
        "uniform_bits": (_C.uniform_bits, {"seed": 1, "position": 2, "count": 3, "draw": 1}),
        "verify_block": (verify_block, {"logits": logits, "proposals": [1, 3], "params": params, "position": 0}
                         | history | proposed),
        "token_probabilities": (token_probabilities, {"logits": logits[0], "params": params, "out": probabilities}
                                | history),
        "accept_rows": (accept_rows, {"logits": logits, "own": own} | row_counts),
        "accept_chosen": (accept_chosen, {"choices": ids, "are_finite": ids > 1} | row_counts),
        "append_all": (append_all, {"own": own, "proposals": drafted, "accepted": [[1, 3, 5]], "time": 0.5, "begin": 1,
                                    "cut": 2, "lengths": [4], "vocab": 48, "others": [3, 9]}),
        "draft_counts": (draft_counts, {"proposals": drafted, "accepted": [[1, 3, 5]]}),
        "row_passes": (_C.row_passes, {"slots": [4, 7], "num_rows": [3, 2], "num_kept": [1, 2], "max_rows": 2}),
        "token_logprobs": (_C.token_logprobs, {"logits": logits, "token_ids": [1, 2, 47]}),
        "kv_injection_attention_reference": (bound(kv_injection, _C.kv_injection_attention_reference), call),
        "kv_injection_attention_workspace_bytes":
            (bound(kv_injection, _C.kv_injection_attention_workspace_bytes), call),
        "kv_injection_attention": (bound(kv_injection, _C.kv_injection_attention), call | launch),
        "kv_injection_append_reference": (_C.kv_injection_append_reference, append),
        "kv_injection_append": (_C.kv_injection_append, append | {"stream": 0}),
        "PassRows": (attend, rows_of_pass),
        "linear_panels": (bound(linear, _C.linear_panels), columns),
        "linear_bfloat16": (bound(linear, _C.linear_bfloat16), columns),
        "rms_norm": (
            lambda rows, dim, threads: _C.rms_norm(0, rows if dim < 1 else min(rows, 0), dim, 0, 1e-6, 0, threads, 0),
            {"rows": 0, "dim": 8, "threads": 1},
        ),
    }  # fmt: skip


def summary(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {value.stride()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {summary(item)}" for name, item in value.items()) + "}"
    return repr(value)


def main(seed: int, count: int) -> None:
    rng = random.Random(seed)
    for function, arguments in calls().values():
        if "stream" not in arguments:  # else it asks for a GPU
            function(**arguments)
    for _ in range(count):
        for name, (function, arguments) in calls().items():
            for argument in rng.sample(list(arguments), rng.randint(1, min(3, len(arguments)))):
                arguments = arguments | {argument: changed(rng, arguments[argument])}
            print(name, summary(arguments), file=sys.stderr)
            try:
                function(**arguments)
            except REFUSALS as error:
                print("refused:", str(error).splitlines()[:1], file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
