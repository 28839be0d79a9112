# SPDX-License-Identifier: Apache-2.0
"""Values that only the device knows: out of range, a request's output is NaN and no other memory is read.

TensorRT's builder times nodes with arbitrary values. Reference and emulated kernels get them, too, under ASan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_trt import _C
from tests.plugins.cases import FP8, Case, Pages
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import BF16_BLOCKS, MMA, SHORT, build_kernel, once
from tests.plugins.tensors import BAD, attributes, draw, inputs, out_of_range, output, reference

WGMMA = 32
MOST_SECONDS = 3600
SOURCES = [
    emulation.HERE / "random_inputs.cpp",
    *(emulation.PLUGINS / "kv_injection_attention" / name for name in ("check.cpp", "numbers.cpp", "reference.cpp")),
]
DENSE = Case(name="dense", S=3, N=4, G=2, L=2, layer=1, C_max=9, slots=3, context_lengths=(9, 4, 0))
PAGED = replace(DENSE, name="paged", C_max=90, context_lengths=(70, 33, 5), pages=Pages(16), window=60)
SIZE, PAGE, KV, ROW, HEAD, NUM_PAGES = range(6)  # fields of context_layout
LARGEST_ROW = (2**31 - 1) // 16

Node = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("kernel", "calls"),
    [(MMA, 40), *(pytest.param(kernel, 10_000, marks=pytest.mark.full) for kernel in (MMA, SHORT, WGMMA))],
)
def test_arbitrary_values_in_any_input(kernel: int, calls: int) -> None:
    """The outputs of reference and kernel are NaN for the same requests, and else agree."""

    def build(path: Path) -> None:
        build_kernel(path, 64, kernel, formats=BF16_BLOCKS, callers=SOURCES)

    program = once(f"random_inputs_{kernel}", build)
    numbers, nans = emulation.run(program, "1", str(calls), seconds=MOST_SECONDS).split()
    assert min(int(numbers), int(nans)) > calls / 8


def refer(case: Case, node: Node) -> torch.Tensor:
    out = output(case, draw(case))
    _C.kv_injection_attention_reference(attributes(case), list(node.values()), out.tensor)
    out.assert_guarded()
    return out.tensor


def with_layout(field: int, value: int, *, checksum: bool = True) -> Callable[[Node], None]:
    def change(node: Node) -> None:
        node["context_layout"][field] = value
        if checksum:
            renew(node)

    return change


def with_address(change: Callable[[int], int], *, checksum: bool = True) -> Callable[[Node], None]:
    def apply(node: Node) -> None:
        node["context_pointers"][1, 0] = change(int(node["context_pointers"][1, 0]))
        if checksum:
            renew(node)

    return apply


def renew(node: Node) -> None:
    pointers, layout = node["context_pointers"], node["context_layout"]
    pointers[:, 1] = ~(pointers[:, 0] + layout.sum())


def filled(value: int) -> Callable[[Node], None]:
    def change(node: Node) -> None:
        for name in ("context_pointers", "context_layout"):
            node[name].fill_(value)

    return change


INVALID: list[tuple[Case, Callable[[Node], None]]] = [
    *((case, with_address(lambda at: at + 8)) for case in (DENSE, PAGED)),
    (DENSE, with_address(lambda at: at + 16, checksum=False)),
    *((DENSE, with_address(lambda _, to=to: to)) for to in (0, -16, -(2**63))),
    *((DENSE, with_layout(field, 8)) for field in (PAGE, KV, ROW, HEAD)),
    *((DENSE, with_layout(field, 1024, checksum=False)) for field in range(6)),
    *((DENSE, with_layout(SIZE, size)) for size in (0, -1, 131073, 2**32 + 9)),
    *((PAGED, with_layout(SIZE, size)) for size in (0, 8, 17, 128, 2**32 + 16)),
    *((PAGED, with_layout(NUM_PAGES, count)) for count in (0, -1, 2**31, 2**32 + 100)),
    *((DENSE, with_layout(ROW, stride)) for stride in (-16, LARGEST_ROW // 16 * 16 + 16, 2**32)),
    *((case, filled(value)) for case in (DENSE, PAGED) for value in (0, 1, -1, 16, 2**31, 2**63 - 1)),
]


@pytest.mark.parametrize(("case", "change"), INVALID)
def test_invalid_pointers_or_layout_make_every_request_nan(case: Case, change: Callable[[Node], None]) -> None:
    node = inputs(case, draw(case))
    kept = node["context_pointers"]
    change(node)
    assert refer(case, node).isnan().all()
    assert kept is node["context_pointers"]  # the caches live as long as it does


def test_checksums_are_of_the_layer_that_is_read() -> None:
    node = inputs(DENSE, draw(DENSE))
    node["context_pointers"][0] = -1
    assert torch.equal(refer(DENSE, node), reference(DENSE, draw(DENSE)))


@pytest.mark.parametrize("case", [PAGED, replace(PAGED, cache_dtype=FP8, output_scale=0.02, sinks=True)])
@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, None])
def test_an_entry_that_leads_to_no_page(value: int | None, case: Case) -> None:
    """Request 0 sees rows 11 to 69: pages 0 to 4 of its table's six."""
    expected = reference(case, draw(case))
    for column, is_read in ((0, True), (4, True), (5, False)):
        node = inputs(case, draw(case))
        pages = int(node["context_layout"][NUM_PAGES])
        node["page_table"][0, column] = pages if value is None else value
        found = refer(case, node)
        assert found[0].isnan().all() == is_read
        first_equal = int(is_read)
        assert torch.equal(found[first_equal:].view(torch.uint8), expected[first_equal:].view(torch.uint8))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_slots_and_lengths_out_of_range(name: str, value: int) -> None:
    case = Case(name="out-of-range", N=2, G=1, S=2, slots=7, C_max=300, context_lengths=(5, 300, 290))
    tensors = draw(case)
    found, expected = reference(case, out_of_range(tensors, name, value)), reference(case, tensors)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])
