# SPDX-License-Identifier: Apache-2.0
"""Names that a release of TensorRT does not have are refused by what stands in for it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dflash_trt.engine.plans import tensorrt_api
from dflash_trt.engine.plans.compile import make_monitor
from tests.contract.checked import Checked
from tests.contract.host_runtime import RTX, VERSIONS, HostRuntime, offer_of
from tests.engine.plans.rtx import tensorrt_rtx


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest) -> Any:
    return Checked(request.param)


def config(trt: Any) -> Any:
    return trt.Builder(tensorrt_api.make_logger(trt)).create_builder_config()


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a function": lambda trt: trt.init_libnvinfer_plugins,
    "a class": lambda trt: trt.ImplicitBatchBuilder,
    "a method": lambda trt: config(trt).set_workspace(1),
    "a method of TensorRT-RTX": lambda trt: config(trt).set_compute_capability(1, 0),
    "an attribute that is read": lambda trt: config(trt).max_workspace_size,
    "an attribute that is written": lambda trt: setattr(config(trt), "num_compute_capabilities", 1),
    "an attribute that only is read": lambda trt: setattr(config(trt), "num_optimization_profiles", 1),
    "a flag": lambda trt: trt.BuilderFlag.FASTER,
    "a flag of TensorRT-RTX": lambda trt: trt.BuilderFlag.REQUIRE_USER_ALLOCATION,
    "an argument too many": lambda trt: config(trt).add_optimization_profile(1, 2),
    "an argument too few": lambda trt: config(trt).set_timing_cache(1),
    "an argument's name": lambda trt: config(trt).set_timing_cache(cache=1, ignore=True),
    "a constructor": lambda trt: trt.IBuilderConfig(),
}


@pytest.mark.parametrize("use", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_names_are_refused(use: Callable[[Any], object], trt: Any) -> None:
    with pytest.raises((AttributeError, TypeError, KeyError)):
        use(trt)


@pytest.mark.parametrize("version", [*VERSIONS, RTX])
def test_the_runtime_refuses_them_too(version: str) -> None:
    host = HostRuntime(version)
    with pytest.raises(TypeError):
        host.ICudaEngine()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        host.ExecutionContextAllocationStrategy.FASTER  # type: ignore[attr-defined]  # noqa: B018
    assert hasattr(host, "CudaGraphStrategy") == (version == RTX)


def test_what_only_one_version_has() -> None:
    """Precision flags went with 11, and this is how we would notice that we used one."""
    old, new = map(HostRuntime, VERSIONS)
    assert old.BuilderFlag.BF16 is not None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        new.BuilderFlag.BF16  # type: ignore[attr-defined]  # noqa: B018
    assert tensorrt_api.version_of(VERSIONS[0]) == tensorrt_api.RUNTIMES["tensorrt"].oldest
    assert tensorrt_api.version_of(RTX) == tensorrt_api.RUNTIMES["tensorrt_rtx"].oldest
    assert tensorrt_rtx().__version__ == RTX


@pytest.mark.parametrize("version", [*VERSIONS, RTX])
def test_the_progress_monitor_overrides_what_tensorrt_calls(version: str) -> None:
    """TensorRT calls these by name; a monitor that lacks one would never hear of it."""
    offer = offer_of(version)["classes"]["IProgressMonitor"]["methods"]
    monitor = make_monitor(HostRuntime(version), progress=None)  # type: ignore[arg-type]
    for name in offer.keys() - {"__init__"}:
        assert name in vars(type(monitor))
        assert [list(inspect.signature(getattr(monitor, name)).parameters)] == offer[name]


@pytest.mark.parametrize("version", ["10.15.1.29", "11.4.0.106", "11.4", "10.16.0.post1"])
def test_versions_are_read(version: str) -> None:
    assert tensorrt_api.version_of(version) >= tensorrt_api.RUNTIMES["tensorrt"].oldest


def test_warnings_leave_stdout_to_data(capfd: pytest.CaptureFixture[str]) -> None:
    """The bindings' own logger prints them there."""
    trt = tensorrt_rtx()
    logger = tensorrt_api.make_logger(trt)
    for severity in (trt.ILogger.INFO, trt.ILogger.WARNING, trt.ILogger.ERROR):
        logger.log(severity, "said")
    logger.log(trt.ILogger.WARNING, "Make sure input context_layout has Int64 binding.")
    sys.stderr.flush()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "TensorRT: warning: said\nTensorRT: error: said\n")
