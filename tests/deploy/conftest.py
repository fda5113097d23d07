"""What the tests of deploy/ share: the build folder, an installation, and running programs."""
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["CERTKV_BUILD_DIRECTORY"])
PROGRAMS = ["certkv", "certkv-certifier", "certkv-gate", "certkv-kvstore", "certkvd"]
SERVERS = PROGRAMS[1:]


def run(*command, **options):
    """Runs a command, which has to end with 0; returns its standard output."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=240, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def need(program):
    """Skips the test where a program is missing."""
    if shutil.which(program) is None:
        pytest.skip(f"needs the program {program}")
    return program


def sample_of(server):
    """The file of deploy/config, and of /etc/certkv, that is a server's."""
    return server.removeprefix("certkv-") + ".yaml"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """An installation with a prefix of its own."""
    prefix = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--component", "certkv", "--prefix", prefix, "--strip")
    return prefix
