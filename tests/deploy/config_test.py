"""The samples of deploy/config, read by the programs that they are for."""
import re

import pytest

from conftest import BUILD, ROOT, run

SAMPLES = sorted((ROOT / "deploy/config").glob("*.yaml"))
SETTING = re.compile(r"^  (\w+): (.+)$", re.MULTILINE)


def server_of(path):
    """gate.yaml and gate-redis.yaml are of certkv-gate."""
    stem = path.stem.split("-")[0]
    return BUILD / "bin" / (stem if stem == "certkvd" else f"certkv-{stem}")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """What the samples want in /etc/certkv, made as they say."""
    folder = tmp_path_factory.mktemp("secrets")
    tool = ROOT / "deploy/tls/make-certificates"
    run(tool, folder, "ca")
    run(tool, folder, "server", "gpu-07")
    run(tool, folder, "client", "store-gpu-07", "read", "*")
    password = folder / "redis-password"
    password.write_text("0123456789abcdef" * 2 + "\n")
    password.chmod(0o600)
    return folder


def with_secrets(path, secrets, folder):
    copy = folder / path.name
    copy.write_text(path.read_text().replace("/etc/certkv/", f"{secrets}/"))
    return copy


def test_there_is_a_sample_of_every_kind():
    names = {path.name for path in SAMPLES}
    assert {"certkvd.yaml", "kvstore.yaml", "kvstore-cluster.yaml", "certifier.yaml", "gate.yaml",
            "gate-redis.yaml"} <= names


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_its_program_reads_it(path, secrets, tmp_path):
    config = with_secrets(path, secrets, tmp_path)
    assert run(server_of(path), "--config", config, "--check-config") == f"{config}: good\n"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_what_it_sets_is_in_force(path, secrets, tmp_path):
    config = with_secrets(path, secrets, tmp_path)
    in_force = run(server_of(path), "--config", config, "--print-config")
    settings = SETTING.findall(config.read_text())
    assert settings
    for name, value in settings:
        printed = re.search(rf"^  {name}: \"?([^\"#]*?)\"?( +#.*)?$", in_force, re.MULTILINE)
        assert printed and printed[1] == value, f"{name}: {value} became {printed and printed[0]}"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_file_that_it_names_is_one_that_is_made(path, secrets):
    for name in re.findall(r"^[^#]*: /etc/certkv/(\S+)$", path.read_text(), re.MULTILINE):
        assert (secrets / name).exists(), name
