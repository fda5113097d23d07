"""deploy/docker/Dockerfile: its stages and what it copies; built where there is an engine."""
import os
import re
import shutil
import subprocess

import pytest
import yaml

from conftest import BUILD, PROGRAMS, ROOT, SERVERS, run, sample_of

PATH = ROOT / "deploy/docker/Dockerfile"


def instructions(text):
    """[(instruction, arguments)], continued lines joined, comments left out."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", lines)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages():
    found = []
    for name, arguments in instructions(PATH.read_text()):
        if name == "FROM":
            found.append([])
        found[-1].append((name, arguments))
    return found


def test_both_stages_are_of_the_same_debian():
    bases = [stage[0][1].split()[0] for stage in stages()]
    assert bases == ["debian:12", "debian:12-slim"]


def test_the_last_stage_has_the_package_alone_and_another_user():
    build, last = stages()
    assert build[0][1].endswith(" AS build")
    copies = [arguments for name, arguments in last if name == "COPY"]
    assert copies == ["--from=build /src/build/package/certkv_*.deb /tmp/"]
    user, = [arguments for name, arguments in last if name == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    names = [name for name, _ in last]
    assert "RUN" not in names[names.index("USER"):], "built as root, run as another"
    manifests = (ROOT / "deploy/kubernetes/kvstore.yaml").read_text()
    assert f"runAsUser: {user.split(':')[0]}\n" in manifests


def test_nothing_is_fetched_but_debians_packages():
    for name, arguments in instructions(PATH.read_text()):
        assert name in {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "STOPSIGNAL",
                        "HEALTHCHECK", "CMD"}
        assert not re.search(r"https?://|curl|wget|\bpip\b|git clone", arguments)


def test_it_builds_every_program_and_starts_one_with_its_sample():
    text = PATH.read_text()
    targets = re.search(r"\./dev build release ([^\n\\]+)", text)[1].split()
    assert set(targets) == set(PROGRAMS)
    assert "-D CPACK_COMPONENTS_ALL=certkv " in text, "the C library is not built"
    command = yaml.safe_load(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert command[0] in SERVERS
    assert command[1:] == ["--config", f"/etc/certkv/{sample_of(command[0])}"]


def test_the_sample_listens_where_the_health_check_asks():
    text = PATH.read_text()
    directory = re.search(r"^ENV CERTKV_RUNTIME_DIR=(\S+)$", text, re.MULTILINE)[1]
    environment = dict(os.environ, CERTKV_RUNTIME_DIR=directory)
    check = yaml.safe_load(re.search(r"^HEALTHCHECK .*CMD (.*)$", text, re.MULTILINE)[1])
    assert check == ["certkv", "health"]
    config = run(BUILD / "bin/certkvd", "--config", ROOT / "deploy/config/certkvd.yaml",
                 "--print-config", env=environment)
    assert f'unix_socket: "{directory}/certkvd.sock"' in config


def test_the_context_leaves_out_what_is_built():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert {"build", ".git"} <= set(lines)


def test_the_image_builds(tmp_path):
    engine = next((name for name in ["docker", "podman", "buildah"] if shutil.which(name)), None)
    if engine is None or subprocess.run([engine, "info"], capture_output=True).returncode != 0:
        pytest.skip("needs a container engine that runs (docker, podman or buildah)")
    if os.environ.get("CERTKV_BUILD_IMAGE") is None:
        pytest.skip("builds everything anew: needs CERTKV_BUILD_IMAGE=1")
    tag = f"certkv-test:{os.getpid()}"
    subprocess.run([engine, "build", "-f", PATH, "-t", tag, ROOT], check=True)
    try:
        assert run(engine, "run", "--rm", tag, "certkvd", "--version").startswith("certkvd ")
        assert run(engine, "run", "--rm", tag, "id", "-u") == "10001\n"
    finally:
        subprocess.run([engine, "rmi", tag], check=False)
