"""The installed package: metadata, import, the demonstration program, the choices of the build."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import jax_fa_epilogue as fa
from jax_fa_epilogue import __main__ as demonstration
from jax_fa_epilogue import _native, native

SOURCE = pathlib.Path(__file__).resolve().parents[1]


def run_python(*arguments, cwd, **environment):
    """Run Python on the CPU in another folder, so that it finds the installed package only."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


# ---- Metadata and import ------------------------------------------------------------------------


def test_version_is_that_of_the_metadata():
    assert fa.__version__ == importlib.metadata.version("jax_fa_epilogue")


def test_type_information_is_shipped():
    assert pathlib.Path(fa.__file__).with_name("py.typed").is_file()


def test_run_time_requirements_are_jax_alone():
    requirements = importlib.metadata.requires("jax_fa_epilogue")
    assert [r for r in requirements if "extra ==" not in r] == ["jax>=0.10.2"]


def test_import_starts_no_backend(tmp_path):
    """With an unknown platform every start of a backend fails, and the import does not."""
    script = "import {0}; print('imported'); import jax; jax.devices()"
    got = run_python("-c", script.format("jax_fa_epilogue"), cwd=tmp_path, JAX_PLATFORMS="nonesuch")
    assert got.stdout == "imported\n"
    assert got.returncode != 0 and "nonesuch" in got.stderr


def test_import_is_quick(tmp_path):
    """Under 0.3 s of processor time beyond jax, the best of three."""
    script = textwrap.dedent("""
        import time, jax, jax.numpy
        start = time.process_time()
        import jax_fa_epilogue
        print(time.process_time() - start)
    """)
    assert min(float(run_python("-c", script, cwd=tmp_path).stdout) for _ in range(3)) < 0.3


def test_parts_of_the_native_module_agree():
    built = [kernel["name"] for kernel in _native.kernels() if kernel["built"]]
    targets = {
        native.FORWARD_TARGET,
        native.BACKWARD_TARGET,
        native.EPILOGUE_TARGET,
        native.COMBINE_TARGET,
    }
    assert (targets <= set(_native.handlers())) == _native.cuda_built
    assert bool(built) == _native.cuda_built
    assert (_native.cuda_version() >= 12040) == _native.cuda_built


def test_build_uses_the_oldest_supported_ffi_api():
    assert tuple(_native.ffi_api_version()) == (0, 3)


def test_import_refuses_a_library_built_for_a_newer_ffi_api(tmp_path):
    script = textwrap.dedent(f"""
        import importlib.util, sys
        name = "jax_fa_epilogue._native"
        spec = importlib.util.spec_from_file_location(name, {_native.__file__!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.ffi_api_version = lambda: (0, 999)
        sys.modules[name] = module
        import jax_fa_epilogue
    """)
    got = run_python("-c", script, cwd=tmp_path)
    assert got.returncode == 1
    last_line = got.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: jax_fa_epilogue was built for version 0.999")


# ---- python -m jax_fa_epilogue ------------------------------------------------------------------


def test_demonstration_passes(tmp_path):
    got = run_python("-m", "jax_fa_epilogue", "--quick", "--device", "cpu", cwd=tmp_path)
    assert got.returncode == 0, got.stdout + got.stderr
    assert f"jax_fa_epilogue {fa.__version__}" in got.stdout
    for name in ("forward", "backward", "dense", "packed", "variable", "splits", "fp8", "combine"):
        assert name in got.stdout
    assert "WRONG" not in got.stdout


@pytest.mark.parametrize(
    ("function", "checks", "damage"),
    [
        ("epilogue", "_epilogue_checks", lambda out, lse: (out, lse.at[0, ..., 0].add(0.1))),
        ("epilogue", "_epilogue_checks", lambda out, lse: (out.at[0, 3].set(out[0, 4]), lse)),
        ("combine", "_combine_checks", lambda out, lse: (out.at[0, 0, 0].set(0), lse)),
        ("flash_attention", "_attention_checks", lambda out, lse: (out.at[-1, 7].mul(2), lse)),
    ],
)
def test_demonstration_fails_on_a_wrong_result(monkeypatch, capsys, function, checks, damage):
    right = getattr(fa, function)
    monkeypatch.setattr(fa, function, lambda *a, **k: damage(*right(*a, **k)))
    monkeypatch.setattr(demonstration, "_CHECKS", (getattr(demonstration, checks),))
    assert demonstration.main(["--quick", "--device", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_demonstration_error_measure():
    want = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert demonstration._error(want, want) == 0
    assert demonstration._error(want + np.array([[0, 0], [5, 0]]), want) == pytest.approx(2**0.5)
    assert demonstration._error(want[:1], want) == np.inf
    assert demonstration._error(np.full_like(want, np.nan), want) == np.inf
    assert demonstration._error(want, np.full_like(want, -np.inf)) == np.inf
    assert demonstration._error(np.full_like(want, -np.inf), np.full_like(want, -np.inf)) == 0


def test_demonstration_names_a_missing_device(capsys):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a CUDA device")
    assert demonstration.main(["--quick", "--device", "cuda"]) == 2
    assert "no cuda device" in capsys.readouterr().err


def test_readme_examples_run(tmp_path):
    """All of them as one script: later ones go on where the first ends."""
    blocks = re.findall(r"```python\n(.*?)```", (SOURCE / "README.md").read_text(), re.DOTALL)
    got = run_python("-c", "\n".join(blocks), cwd=tmp_path)
    assert got.returncode == 0, got.stderr


# ---- The build's choices ------------------------------------------------------------------------


def configure(build, **environment):
    """Run CMake's configuration step alone."""
    cmake = pytest.importorskip("cmake", reason="the CMake of the test extra is not installed")
    pytest.importorskip("nanobind", reason="the nanobind of the test extra is not installed")
    return subprocess.run(
        [
            pathlib.Path(cmake.CMAKE_BIN_DIR, "cmake"),
            *("-S", SOURCE, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"),
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def warnings(got):
    return [line for line in (got.stdout + got.stderr).splitlines() if "arning" in line]


@pytest.fixture
def old_nvcc(tmp_path):
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.3, V12.3.107'\n")
    path.chmod(0o755)
    return path


def test_cuda_on_without_nvcc_fails(tmp_path):
    got = configure(tmp_path / "build", JAX_FA_CUDA="on", CUDACXX=str(tmp_path / "nvcc"))
    assert got.returncode != 0
    assert "JAX_FA_CUDA=on" in got.stderr and str(tmp_path / "nvcc") in got.stderr


def test_cuda_on_with_an_old_nvcc_fails(tmp_path, old_nvcc):
    got = configure(tmp_path / "build", JAX_FA_CUDA="on", CUDACXX=str(old_nvcc))
    assert got.returncode != 0
    assert "is CUDA 12.3, 12.4 or newer is needed" in " ".join(got.stderr.split())


def test_cuda_auto_without_a_usable_nvcc_warns_in_one_line(tmp_path, old_nvcc):
    got = configure(tmp_path / "build", JAX_FA_CUDA="auto", CUDACXX=str(old_nvcc))
    assert got.returncode == 0, got.stderr
    (line,) = warnings(got)
    assert "built without CUDA kernels" in line and "12.3" in line
    assert (tmp_path / "build/generated/include/built_kernels.def").read_text() == ""


def test_cuda_off_is_silent(tmp_path):
    got = configure(tmp_path / "build", JAX_FA_CUDA="off")
    assert got.returncode == 0, got.stderr
    assert warnings(got) == []


def test_other_values_are_refused(tmp_path):
    got = configure(tmp_path / "build", JAX_FA_CUDA="maybe")
    assert got.returncode != 0
    assert "JAX_FA_CUDA must be auto, on or off, got 'maybe'" in " ".join(got.stderr.split())
