"""docs/operations.md: what it names exists, what it quotes was measured, and no alert is left out."""
import json
import re

import pytest
import yaml

from conftest import BUILD, ROOT, run

TEXT = (ROOT / "docs/operations.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", TEXT) + re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def results(name):
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def test_every_alert_says_what_to_do():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/certkv.rules.yml").read_text())
    alerts = {rule["alert"]: rule["labels"]["severity"]
              for group in rules["groups"] for rule in group["rules"]}
    rows = re.findall(r"^\| `(Certkv\w+)`( \(page\))? \| (.{40,}) \|$", TEXT, re.MULTILINE)
    assert {name: "page" if page else "ticket" for name, page, _ in rows} == alerts


def test_settings_and_metrics_exist():
    config = (ROOT / "docs/config.md").read_text()
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", config, re.MULTILINE | re.DOTALL))
    settings = {word for code in CODE
                for word in re.findall(r"^(?:server|kvstore|certifier|gate)\.\w+$", code)}
    assert len(settings) > 15
    for setting in settings:
        section, name = setting.split(".")
        assert f"| `{name}` |" in sections[section], setting
    metrics = {code for code in CODE if re.fullmatch(r"certkv_\w+", code)}
    assert metrics
    for metric in metrics:
        assert f"| `{metric}` |" in (ROOT / "docs/metrics.md").read_text()


def test_commands_exist():
    commands = {word for code in CODE
                for word in re.findall(r"(?<![\w/.-])certkv (?:--target \S+ )?([a-z]+)", code)}
    assert len(commands) >= 4
    for command in commands:
        assert run(BUILD / "bin/certkv", command, "--help")


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 8
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


def quotes():
    """What the page has to say, made from what was measured."""
    kernels = (ROOT / "docs/performance.md").read_text()
    read = float(re.search(r"\| `K8V4` \| 203 \| \S+ / (\S+) / ", kernels)[1])
    spill, bulk, gate = results("spill"), results("bulk")["throughput"], results("gate")
    lookup = {row["block_count"]: row for row in results("services")["lookup_and_lease"]}[128]
    write, fetch = spill["write_gigabytes_per_second"], spill["read_gigabytes_per_second"]
    etcd = {row["nodes"]: row for row in results("membership")["rows"]}[200]
    originals, quantized = 32 * 8 * 512, 32 * 8 * 203
    demo, demo_quantized = 4 * 3 * 256, 4 * 3 * 103
    return [
        f"takes {read} ns a token",
        f"over 32,768 tokens is {32 * 8 * 32768 * read * 1e-9:.2f} core-seconds",
        f"of 128 blocks took {lookup['p50_us'] / 1000:.2f} ms",
        f"wrote {write['rocksdb']:.2f} GB/s and read {fetch['rocksdb']:.2f} GB/s of what a plain file "
        f"does at {write['file']:.2f} and {fetch['file']:.2f}",
        f"A million blocks take {spill['open']['seconds_per_million']:.1f} s to open",
        f"at {write['rocksdb']:.2f} GB/s is {600 * round(write['rocksdb'], 2):.0f} GB",
        f"reached {bulk['ratio']:.2f} of a plain socket's throughput in the same run (medians; "
        f"{bulk['ratio_least']:.2f} to {bulk['ratio_most']:.2f})",
        f"200 nodes used {etcd['etcd_processors']:.2f} of a processor",
        f"{gate['engine']['bytes_per_request'] / 1000:.0f} KB for each request with "
        f"{gate['engine']['heads_per_request']} heads",
        f"A decision took {gate['decide']['decide_p50_us'] / 1000:.2f} ms",
        f"| {originals / 1024:.0f} KiB | {quantized / 1024:.1f} KiB | "
        f"{min(20 * 2**30 // originals, 8 * 2**30 // quantized):,} |",
        f"| {demo / 1024:.1f} KiB | {demo_quantized / 1024:.1f} KiB | "
        f"{min(20 * 2**30 // demo, 8 * 2**30 // demo_quantized):,} |",
    ]


@pytest.mark.parametrize("quote", quotes())
def test_figures_are_those_that_were_measured(quote):
    assert quote in re.sub(r"\s+", " ", TEXT)
