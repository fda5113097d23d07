"""The C interface as others get it: what the library exports, and an outside project that finds the
installation by CMake or pkg-config and runs against a certkvd."""
import contextlib
import os
import re
import subprocess
import time

import pytest

import c_abi
from conftest import BUILD, ROOT, need, run

EXAMPLE = ROOT / "clients/c/example"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """What `cmake --install` puts there when it isn't told a component."""
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder, "--strip")
    return folder


@contextlib.contextmanager
def certkvd(folder):
    """A server of the test's own; yields its target."""
    socket = folder / "certkvd.sock"
    environment = {**os.environ, "CERTKV_RUNTIME_DIR": str(folder)}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([BUILD / "bin/certkvd"], env=environment, stdout=log, stderr=log)
    try:
        for _ in range(200):
            if socket.exists():
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        assert socket.exists(), (folder / "log").read_text()
        yield f"unix:{socket}"
    finally:
        process.terminate()
        process.wait(30)


def check_output(out):
    """Of the example: every head certified or exact, within its bound, and counted by gate."""
    assert out.count("holds") == 12 and "WRONG" not in out
    assert "256 of 300 tokens are in whole blocks" in out
    assert re.search(r"gate counted 12 reads, worst tv 0\.0\d+", out)
    assert out.endswith("all as certified\n")


def without_settings():
    """An environment in which nothing says where CertKV is."""
    names = ["PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "LD_LIBRARY_PATH"]
    return {name: value for name, value in os.environ.items() if name not in names}


def test_the_interface_is_the_one_that_was_promised():
    expected = (ROOT / "clients/c/libcertkv.abi").read_text()
    actual = c_abi.abi(BUILD / "lib/libcertkv.so.1")
    assert actual.splitlines() == expected.splitlines(), (
        "lines may be added to clients/c/libcertkv.abi (tests/deploy/c_abi.py prints it); one that "
        "changed or is gone breaks programs that are compiled already")


def test_every_declared_function_is_exported_and_nothing_else():
    declared = set(c_abi.declarations()[0])
    exported = {symbol.split("@")[0] for symbol in c_abi.exported(BUILD / "lib/libcertkv.so.1")}
    assert len(declared) > 20
    assert exported == declared


@pytest.mark.parametrize("words", [
    ["cc", "-std=c11", "-x", "c"], ["c++", "-std=c++11", "-x", "c++"],
    ["c++", "-std=c++20", "-x", "c++"]], ids=lambda words: words[1])
def test_the_header_alone_is_good_c_and_cpp(prefix, tmp_path, words):
    source = tmp_path / "source"
    source.write_text("#include <certkv/certkv.h>\n#include <certkv/certkv.h>\n"
                      "int main(void) { return certkv_version() == 0; }\n")
    run(*words, "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{prefix / 'include'}", "-fsyntax-only",
        source)


def test_an_outside_project_finds_it_by_cmake_and_runs(prefix, tmp_path):
    run("cmake", "-S", prefix / "share/doc/libcertkv-dev/example", "-B", tmp_path / "build",
        f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror",
        env=without_settings())
    run("cmake", "--build", tmp_path / "build")
    with certkvd(tmp_path) as target:
        check_output(run(tmp_path / "build/attend", target, env=without_settings()))


def test_an_outside_project_finds_it_by_pkg_config_and_runs(prefix, tmp_path):
    need("pkg-config")
    environment = {**without_settings(), "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "certkv >= 0.1", env=environment).split()
    assert not any(str(BUILD) in flag for flag in flags)
    run("cc", "-std=c11", EXAMPLE / "attend.c", *flags, "-lm", "-o", tmp_path / "attend")
    environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
    with certkvd(tmp_path) as target:
        check_output(run(tmp_path / "attend", target, env=environment))


def test_the_example_notices_outputs_that_are_not_as_certified(prefix, tmp_path):
    """The example with a mistake: it attends with other keys than it put."""
    text = (EXAMPLE / "attend.c").read_text()
    right = "keys[layer][token][i] = half_of(key_of[layer][token][i]);"
    assert right in text
    (tmp_path / "attend.c").write_text(
        text.replace(right, "keys[layer][token][i] = half_of(-key_of[layer][token][i]);"))
    run("cc", "-std=c11", f"-I{prefix / 'include'}", tmp_path / "attend.c",
        prefix / "lib/libcertkv.so", "-lm", f"-Wl,-rpath,{prefix / 'lib'}", "-o", tmp_path / "attend")
    with certkvd(tmp_path) as target:
        result = subprocess.run([tmp_path / "attend", target], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout.count("WRONG") == 12


def test_the_example_says_why_when_no_server_is_there(prefix, tmp_path):
    run("cc", "-std=c11", f"-I{prefix / 'include'}", EXAMPLE / "attend.c",
        prefix / "lib/libcertkv.so", "-lm", f"-Wl,-rpath,{prefix / 'lib'}", "-o", tmp_path / "attend")
    result = subprocess.run([tmp_path / "attend", f"unix:{tmp_path}/none.sock"],
                            capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("attach: UNAVAILABLE [")


@pytest.mark.parametrize("wanted, message", [
    ("1.0", 'compatible with requested version "1.0"'),
    ("0.1 COMPONENTS cpp", "certkv has no component 'cpp', only c")], ids=["version", "component"])
def test_cmake_refuses_what_is_not_there(prefix, tmp_path, wanted, message):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.13)\nproject(outside LANGUAGES C)\n"
        f"find_package(certkv {wanted} REQUIRED)\n")
    result = subprocess.run(
        ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True, text=True, env=without_settings())
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


def test_installing_everything_leaves_the_wheels_files_out(prefix):
    assert {path.name for path in prefix.iterdir()} == {"bin", "etc", "include", "lib", "share"}
    assert not list(prefix.rglob("_native*"))
