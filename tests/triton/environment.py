# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver, in an environment of its own that also sees this one's packages.

nvidia-pytriton 0.7.0 brings Triton 2.51, whose Python backend reads arrays of NumPy 1 only.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
DIRECTORY = REPOSITORY / "build" / "pytriton-0.7.0"
SITES = "DFLASH_TEST_SITES"
"""Directories that a server's models may import from beside."""
BESIDE = (
    f"import os, site; list(map(site.addsitedir, filter(None, os.environ.get('{SITES}', '').split(':'))))\n"
    f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
)
MPI_LIBRARY = Path(sys.prefix) / "lib" / "libmpi.so.12"  # the mpich package's; mpi4py looks beside its Python
INSTALL_SECONDS = 300


class Environment:
    """Where the server's files lie."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.triton = site_packages(directory) / "pytriton" / "tritonserver"

    def variables(self, sites: tuple[Path, ...]) -> dict[str, str]:
        """This environment first on PATH, where the Python backend looks, and the library of this very Python."""
        return os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),
            "OMP_NUM_THREADS": "1",
            SITES: ":".join(map(str, sites)),
            **({"MPI4PY_LIBMPI": str(MPI_LIBRARY)} if MPI_LIBRARY.is_file() else {}),
        }


@functools.cache
def environment() -> Environment:
    """Made once a checkout; skips the test where it cannot be."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        pytest.skip("tritonserver: nvidia-pytriton has wheels for Linux on x86_64 only")
    library = Path(sysconfig.get_config_var("LIBDIR")) / (sysconfig.get_config_var("INSTSONAME") or "-")
    if not library.is_file():
        pytest.skip("tritonserver: its Python backend needs a Python that was built with its shared library")
    if not DIRECTORY.is_dir():
        _install(DIRECTORY)
    (site_packages(DIRECTORY) / "beside.pth").write_text(BESIDE)
    return Environment(DIRECTORY)


def site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _install(directory: Path) -> None:
    """Complete or not there: made under another name, then renamed."""
    temporary = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    try:
        venv.create(temporary, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(temporary / "bin" / "python")]
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries", "1", "--only-binary", ":all:"]
        installed = subprocess.run(
            [*pip, "install", *options, *PACKAGES], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
        if installed.returncode:
            pytest.skip(f"tritonserver: pip cannot install {PACKAGES[0]}: {installed.stderr.strip()[-200:]}")
        triton = site_packages(temporary) / "pytriton" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = Path("python_backend_stubs") / version / "triton_python_backend_stub"
        if not (triton / stub).is_file():
            pytest.skip(f"tritonserver: nvidia-pytriton has no Python backend for Python {version}")
        (triton / "backends" / "python" / stub.name).symlink_to(Path("..") / ".." / stub)
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process of this run was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
