"""Compiling the kernels: once for a machine, with the compiler that is there, or not at all."""

import os
import stat
import sys

import pytest

from coalign_cpu import library


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Loads with an empty cache."""
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))
    return library.load_kernels.__wrapped__


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that notes its calls and passes them on."""
    if (found := library.find_compiler()) is None:
        pytest.skip("there is no C++ compiler")
    calls, script = tmp_path / "calls", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {" ".join(found)} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(script))
    return lambda: calls.read_text().splitlines() if calls.exists() else []


def test_the_kernels_are_compiled_once(load, compiler, tmp_path):
    assert load() is not None
    assert len(compiler()) == 2  # compiled, linked
    assert load() is not None
    assert len(compiler()) == 2
    assert sorted(file.suffix for file in (tmp_path / "cache" / "kernels").iterdir()) == [".lock", ".so"]


@pytest.mark.skipif("x86_64" not in os.uname().machine, reason="of x86")
def test_they_keep_to_the_instructions_that_torch_is_restricted_to(load, compiler, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    library.describe_processor.cache_clear()
    try:
        assert load() is not None
        assert "-march=x86-64-v3" in compiler()[0]
    finally:
        library.describe_processor.cache_clear()


def test_without_a_compiler_there_are_none(load, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with caplog.at_level("INFO"):
        assert load() is None
    assert "no C++ compiler was found" in caplog.text


@pytest.mark.parametrize("command", ["false", "a-compiler-that-is-not-there"])
def test_a_compiler_that_fails_is_reported_and_leaves_nothing(load, monkeypatch, caplog, tmp_path, command):
    monkeypatch.setenv("CXX", command)
    assert load() is None
    assert "the kernels for CPUs were not compiled" in caplog.text
    assert [file.suffix for file in (tmp_path / "cache" / "kernels").iterdir()] == [".lock"]


def test_what_the_compiler_said_is_in_the_message(load, monkeypatch, caplog, tmp_path):
    broken = tmp_path / "kernels.cpp"
    broken.write_text("this is no program\n")
    monkeypatch.setattr(library, "SOURCE", broken)
    if library.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert load() is None
    assert "kernels.cpp" in caplog.text


def test_a_process_that_has_not_imported_torch_can_load_them():
    import subprocess

    code = "from coalign_cpu.library import load_kernels; print(load_kernels())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert library.find_compiler() is None or "CDLL" in done.stdout
