"""The Debian packages: their control fields, their files, and that they run when they are unpacked."""
import os
import pathlib
import re
import subprocess

import pytest

from conftest import BUILD, PROGRAMS, SERVERS, need, run, sample_of


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Files of the packages by their names."""
    for program in ["cpack", "dpkg-deb", "dpkg-shlibdeps", "file"]:
        need(program)
    folder = tmp_path_factory.mktemp("package")
    run("cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", folder)
    found = {path.name.split("_")[0]: path for path in folder.glob("*.deb")}
    assert set(found) == {"certkv", "libcertkv1", "libcertkv-dev"}
    return found


@pytest.fixture(scope="module")
def package(packages):
    return packages["certkv"]


@pytest.fixture(scope="module")
def unpacked(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    run("dpkg-deb", "-x", package, folder / "data")
    run("dpkg-deb", "-e", package, folder / "control")
    return folder


def field(package, name):
    return run("dpkg-deb", "-f", package, name).strip()


def test_control_fields_say_what_apt_needs(packages):
    for name, package in packages.items():
        assert field(package, "Package") == name
        assert re.fullmatch(r"\d+\.\d+\.\d+", field(package, "Version"))
        assert field(package, "Architecture") == run("dpkg", "--print-architecture").strip()
        assert "@" in field(package, "Maintainer")
    depends = field(packages["certkv"], "Depends")
    for library in ["libc6 (>=", "libgrpc++", "libprotobuf", "librocksdb", "libssl3", "libhiredis"]:
        assert library in depends
    assert "systemd | systemd-standalone-sysusers" in depends
    assert int(field(packages["certkv"], "Installed-Size")) > 1000  # KiB


def test_the_library_needs_no_server(packages):
    depends = field(packages["libcertkv1"], "Depends")
    assert "libgrpc++" in depends
    assert "librocksdb" not in depends and "systemd" not in depends
    version = field(packages["libcertkv1"], "Version")
    assert field(packages["libcertkv-dev"], "Depends") == f"libcertkv1 (= {version})"


def test_library_and_header_are_apart_and_fit_together(packages, tmp_path):
    for name in ["libcertkv1", "libcertkv-dev"]:
        run("dpkg-deb", "-x", packages[name], tmp_path / name)
    run("dpkg-deb", "-e", packages["libcertkv1"], tmp_path / "control")
    library, development = tmp_path / "libcertkv1/usr", tmp_path / "libcertkv-dev/usr"
    assert {path.name for path in (library / "lib").iterdir()} >= {"libcertkv.so.1"}
    assert not (library / "lib/libcertkv.so").exists()
    assert (development / "include/certkv/certkv.h").is_file()
    assert (development / "lib/libcertkv.so").readlink() == pathlib.Path("libcertkv.so.1")
    shlibs = (tmp_path / "control/shlibs").read_text().split()
    assert shlibs[:3] == ["libcertkv", "1", "libcertkv1"]
    assert "ldconfig" in (tmp_path / "control/postinst").read_text()
    program = tmp_path / "version.c"
    program.write_text("#include <certkv/certkv.h>\n#include <stdio.h>\n"
                       "int main(void) { return puts(certkv_version()) < 0; }\n")
    run("cc", "-std=c11", f"-I{development / 'include'}", program, library / "lib/libcertkv.so.1",
        "-o", tmp_path / "version")
    out = run(tmp_path / "version", env={**os.environ, "LD_LIBRARY_PATH": str(library / "lib")})
    assert out.strip() == field(packages["libcertkv1"], "Version")


def test_files_are_where_debian_wants_them(unpacked):
    data = unpacked / "data"
    assert {path.name for path in (data / "usr/bin").iterdir()} == set(PROGRAMS)
    assert {path.name for path in data.iterdir()} == {"etc", "usr"}
    for server in SERVERS:
        unit = (data / f"usr/lib/systemd/system/{server}.service").read_text()
        assert f"ExecStart=/usr/bin/{server} --config /etc/certkv/{sample_of(server)}\n" in unit
        assert (data / f"usr/share/man/man8/{server}.8").exists()
    for path in ["lib/sysusers.d/certkv.conf", "lib/tmpfiles.d/certkv.conf",
                 "share/bash-completion/completions/certkv", "share/doc/certkv/copyright",
                 "share/doc/certkv/config.md", "share/man/man1/certkv.1"]:
        assert (data / "usr" / path).is_file(), path


def test_every_config_is_a_conffile(unpacked):
    configs = {f"/etc/certkv/{path.name}" for path in (unpacked / "data/etc/certkv").iterdir()}
    assert len(configs) >= len(SERVERS)
    assert set((unpacked / "control/conffiles").read_text().split()) == configs


def test_files_belong_to_root_and_others_cannot_write_them(packages):
    lines = [line for package in packages.values()
             for line in run("dpkg-deb", "-c", package).splitlines() if line[0] != "l"]
    assert len(lines) > 50
    for line in lines:
        mode, owner = line.split()[:2]
        assert owner == "root/root", line
        assert mode[5] != "w" and mode[8] != "w", line


def test_scripts_are_shell_and_name_every_unit(unpacked):
    for name in ["postinst", "prerm", "postrm"]:
        run("sh", "-n", unpacked / "control" / name)
    for name in ["postinst", "prerm"]:
        text = (unpacked / "control" / name).read_text()
        assert set(re.findall(r"(\S+)\.service", text)) == set(SERVERS)


def test_unpacked_programs_run_and_read_their_config(unpacked):
    data = unpacked / "data"
    for server in SERVERS:
        program = data / "usr/bin" / server
        assert run(program, "--version").startswith(f"{server} ")
        config = data / "etc/certkv" / sample_of(server)
        assert run(program, "--config", config, "--check-config") == f"{config}: good\n"
    result = subprocess.run([data / "usr/bin/certkv", "--target", "unix:/nonexistent", "stats"],
                            capture_output=True, text=True)
    assert result.returncode == 3, result.stderr
    assert run(data / "usr/bin/certkv", "--help").startswith("CertKV")
