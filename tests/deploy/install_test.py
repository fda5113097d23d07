"""`cmake --install`: what is where, and that it works there."""
import re
import subprocess

from conftest import BUILD, PROGRAMS, ROOT, SERVERS, need, run, sample_of


def test_programs_run_where_they_are_installed(installed):
    for program in SERVERS:
        assert run(installed / "bin" / program, "--version").startswith(f"{program} ")
    assert "Subcommands:" in run(installed / "bin/certkv", "--help")


def test_installed_samples_are_read_by_installed_programs(installed):
    for server in SERVERS:
        path = installed / "etc/certkv" / sample_of(server)
        out = run(installed / "bin" / server, "--config", path, "--check-config")
        assert out == f"{path}: good\n"


def test_a_changed_config_survives_another_installation(tmp_path):
    install = ["cmake", "--install", BUILD, "--component", "certkv", "--prefix", tmp_path]
    run(*install)
    config = tmp_path / "etc/certkv/gate.yaml"
    config.write_text("gate: {tv_tolerance: 0.05}\n")
    run(*install)
    assert config.read_text() == "gate: {tv_tolerance: 0.05}\n"


def test_units_name_installed_files(installed):
    for server in SERVERS:
        unit = (installed / "lib/systemd/system" / f"{server}.service").read_text()
        paths = re.findall(r"(?:ExecStart|ExecStartPre)=(\S+) --config (\S+)", unit)
        assert len(paths) == 2
        for program, config in paths:
            assert program == str(installed / "bin" / server)
            assert config == str(installed / "etc/certkv" / sample_of(server))
        documents = re.findall(r"file://(\S+)", unit)
        assert documents
        for document in documents:
            with open(document) as file:
                assert file.read()


def test_pages_say_what_the_programs_say(installed):
    for program in PROGRAMS:
        section = 1 if program == "certkv" else 8
        page = installed / f"share/man/man{section}/{program}.{section}"
        text = page.read_text()
        assert str(BUILD) not in text.replace("\\-", "-")
        help_text = run(installed / "bin" / program, "--help")
        summary = re.search(r"^(?!usage:)\S.*", help_text, re.MULTILINE)[0].replace("-", "\\-")
        name = program.replace("-", "\\-")
        assert f".SH NAME\n{name} \\- {summary}\n" in text
        options = set(re.findall(r"^ +(?:-\w,)?(--[a-z-]+)", help_text, re.MULTILINE))
        assert len(options) >= 7
        for option in options:
            assert option.replace("-", "\\-") in text, f"{program}: {option} is not in its page"
    page = (installed / "share/man/man1/certkv.1").read_text()
    assert '.SH "certkv policy try"' in page, "subcommands of subcommands"


def test_pages_are_good_roff(installed):
    need("groff")
    for page in (installed / "share/man").glob("*/*"):
        result = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-b", "-z", page], capture_output=True, text=True
        )
        assert (result.returncode, result.stderr) == (0, ""), page


def test_completion_is_what_the_program_prints(installed):
    path = installed / "share/bash-completion/completions/certkv"
    assert path.read_text() == run(installed / "bin/certkv", "completion")
    script = f"source {path}; COMP_WORDS=(certkv pol); COMP_CWORD=1; _certkv; echo ${{COMPREPLY[0]}}"
    assert run("bash", "-c", script) == "policy\n"


def test_tools_and_dashboards_come_along(installed):
    share = installed / "share/certkv"
    assert "usage: make-certificates" in subprocess.run(
        [share / "make-certificates"], capture_output=True, text=True
    ).stderr
    for path in ["prometheus/certkv.rules.yml", "prometheus/prometheus.yml", "grafana/certkv.json"]:
        assert (share / path).read_bytes() == (ROOT / "deploy" / path).read_bytes()
