"""The Debian package: its control fields, its files, and that they run when they are unpacked."""
import re
import subprocess

import pytest

from conftest import BUILD, PROGRAMS, SERVERS, need, run, sample_of


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    for program in ["cpack", "dpkg-deb", "dpkg-shlibdeps", "file"]:
        need(program)
    folder = tmp_path_factory.mktemp("package")
    run("cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", folder)
    packages = list(folder.glob("certkv_*.deb"))
    assert len(packages) == 1
    return packages[0]


@pytest.fixture(scope="module")
def unpacked(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    run("dpkg-deb", "-x", package, folder / "data")
    run("dpkg-deb", "-e", package, folder / "control")
    return folder


def test_control_fields_say_what_apt_needs(package):
    def field(name):
        return run("dpkg-deb", "-f", package, name).strip()

    assert field("Package") == "certkv"
    assert re.fullmatch(r"\d+\.\d+\.\d+", field("Version"))
    assert field("Architecture") == run("dpkg", "--print-architecture").strip()
    assert "@" in field("Maintainer")
    depends = field("Depends")
    for library in ["libc6 (>=", "libgrpc++", "libprotobuf", "librocksdb", "libssl3", "libhiredis"]:
        assert library in depends
    assert "systemd | systemd-standalone-sysusers" in depends
    assert int(field("Installed-Size")) > 1000  # KiB


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


def test_files_belong_to_root_and_others_cannot_write_them(package):
    lines = run("dpkg-deb", "-c", package).splitlines()
    assert len(lines) > 30
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
