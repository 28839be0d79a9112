# SPDX-License-Identifier: Apache-2.0
"""The recorder refuses what the oldest or the newest bindings lack; so do the tests that run our code on it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from dflash_trt.engine.plans import tensorrt_api
from dflash_trt.engine.plans.compile import make_monitor
from tests.contract.recorder import DATA, VERSIONS, Recorder


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest) -> Any:
    return Recorder(request.param)


def config(trt: Any) -> Any:
    return trt.Builder(trt.Logger(trt.Logger.WARNING)).create_builder_config()


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a function": lambda trt: trt.init_libnvinfer_plugins,
    "a class": lambda trt: trt.ImplicitBatchBuilder,
    "a method": lambda trt: config(trt).set_workspace(1),
    "an attribute that is read": lambda trt: config(trt).max_workspace_size,
    "an attribute that is written": lambda trt: setattr(config(trt), "max_workspace_size", 1),
    "an attribute that only is read": lambda trt: setattr(config(trt), "num_optimization_profiles", 1),
    "a flag": lambda trt: trt.BuilderFlag.FASTER,
    "an argument too many": lambda trt: config(trt).add_optimization_profile(1, 2),
    "an argument too few": lambda trt: config(trt).set_timing_cache(1),
    "an argument's name": lambda trt: config(trt).set_timing_cache(cache=1, ignore=True),
    "a constructor": lambda trt: trt.ICudaEngine(),
}


@pytest.mark.parametrize("use", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_names_are_refused(use: Callable[[Any], object], trt: Any) -> None:
    with pytest.raises((AttributeError, TypeError)):
        use(trt)


def test_what_only_one_version_has() -> None:
    """Precision flags went with 11, and this is how we would notice that we used one."""
    old, new = map(Recorder, VERSIONS)
    assert old.BuilderFlag.BF16 is not None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        new.BuilderFlag.BF16  # type: ignore[attr-defined]  # noqa: B018


def test_keywords_are_those_of_the_bindings(trt: Any) -> None:
    config(trt).set_timing_cache(cache=1, ignore_mismatch=True)
    assert trt.arguments("IBuilderConfig.set_timing_cache") == [(1, True)]


@pytest.mark.parametrize(
    "shapes",
    [([2], [1], [3]), ([1], [4], [3]), ([1, 1], [2], [3]), ([-1], [1], [1])],
    ids=["low", "high", "rank", "-1"],
)
def test_a_profile_out_of_order_raises(shapes: tuple[list[int], ...], trt: Any) -> None:
    """The bindings raise where the C++ call returns false; a return value that nobody reads would not be missed."""
    profile = trt.Builder(trt.Logger(trt.Logger.WARNING)).create_optimization_profile()
    with pytest.raises(RuntimeError, match="inconsistent"):
        profile.set_shape("x", *shapes)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_progress_monitor_overrides_what_tensorrt_calls(version: str) -> None:
    """TensorRT calls these by name; a monitor that lacks one would never hear of it."""
    offer = json.loads((DATA / f"tensorrt-{version}.json").read_text())["classes"]["IProgressMonitor"]["methods"]
    monitor = make_monitor(Recorder(version), progress=None)  # type: ignore[arg-type]
    for name in offer.keys() - {"__init__"}:
        assert name in vars(type(monitor))
        assert [list(inspect.signature(getattr(monitor, name)).parameters)] == offer[name]


@pytest.mark.parametrize("version", ["10.15.1.29", "11.4.0.106", "11.4", "10.16.0.post1"])
def test_versions_are_read(version: str) -> None:
    assert tensorrt_api.version_of(version) >= tensorrt_api.OLDEST


def test_the_oldest_release_is_the_oldest_that_is_recorded() -> None:
    assert tensorrt_api.version_of(VERSIONS[0]) == tensorrt_api.OLDEST
