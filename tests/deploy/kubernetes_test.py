"""deploy/kubernetes: documents that fit each other, the servers' configs, and the schemas."""
import os
import re
import shutil
import subprocess

import pytest
import yaml

from conftest import BUILD, ROOT, run
from config_test import secrets  # noqa: F401, a fixture

FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((FOLDER / name).read_text())
]
NAME = "app.kubernetes.io/name"
WORKLOADS = {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] in ("StatefulSet", "Deployment")}
UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def of_kind(kind):
    return {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] == kind}


def pod_of(workload):
    return workload["spec"]["template"]["spec"]


def server_of(name):
    """A workload's main container, and the config that it is started with."""
    container, = pod_of(WORKLOADS[name])["containers"]
    config = FOLDER / "config" / os.path.basename(container["args"][2])
    return container, yaml.safe_load(config.read_text())


def size(text):
    number, unit = re.fullmatch(r"(\d+)(\w*)", str(text)).groups()
    return int(number) * UNITS[unit]


def test_the_kustomization_lists_every_file():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")}
    generated = {name for g in KUSTOMIZATION["configMapGenerator"] for name in g["files"]}
    assert files == {"kustomization.yaml"} | set(KUSTOMIZATION["resources"]) | generated


def test_documents_have_kinds_and_names_of_their_own():
    assert set(WORKLOADS) == {"certkv-kvstore", "certkv-certifier", "certkv-gate"}
    names = [(d["apiVersion"], d["kind"], d["metadata"]["name"]) for d in DOCUMENTS]
    assert len(names) == len(set(names))
    for document in DOCUMENTS:
        assert "namespace" not in document["metadata"], "kustomize sets it"
        if document["kind"] not in ("Namespace", "NetworkPolicy"):
            assert document["metadata"]["labels"] == {NAME: document["metadata"]["name"]}


@pytest.mark.parametrize("name", WORKLOADS)
def test_selectors_find_their_pods(name):
    workload = WORKLOADS[name]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert labels == {NAME: name} == workload["spec"]["selector"]["matchLabels"]
    assert of_kind("Service")[name]["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("NetworkPolicy")[name]["spec"]["podSelector"]["matchLabels"] == labels
    if workload["kind"] == "Deployment":
        scaler = of_kind("HorizontalPodAutoscaler")[name]["spec"]
        assert (scaler["scaleTargetRef"]["kind"], scaler["scaleTargetRef"]["name"]) == ("Deployment", name)
        assert 1 < scaler["minReplicas"] < scaler["maxReplicas"]
        assert "replicas" not in workload["spec"], "an apply would undo the autoscaler"
    else:
        assert workload["spec"]["serviceName"] == name and workload["spec"]["replicas"] > 1


def test_network_policies_name_pods_that_exist():
    known = set(WORKLOADS) | {"etcd", "redis"}
    for policy in of_kind("NetworkPolicy").values():
        for rule in policy["spec"].get("ingress", []) + policy["spec"].get("egress", []):
            for peer in rule.get("from", []) + rule.get("to", []):
                if "podSelector" in peer:
                    assert peer["podSelector"]["matchLabels"][NAME] in known
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert of_kind("NetworkPolicy")["certkv-default-deny"]["spec"]["podSelector"] == {}


@pytest.mark.parametrize("name", WORKLOADS)
def test_ports_are_those_of_the_config(name):
    container, config = server_of(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    wanted = {"grpc": config["server"]["tcp_address"], "metrics": config["server"]["http_address"]}
    if name == "certkv-kvstore":
        wanted["bulk"] = config["kvstore"]["bulk_address"]
        assert config["cluster"]["target"].endswith(f":{ports['grpc']}")
        assert config["cluster"]["bulk_target"].endswith(f":{ports['bulk']}")
    assert {port: f"0.0.0.0:{number}" for port, number in ports.items()} == wanted
    service = of_kind("Service")[name]["spec"]["ports"]
    assert all(ports[port["targetPort"]] == port["port"] for port in service)
    policy = of_kind("NetworkPolicy")[name]["spec"]["ingress"]
    assert {port["port"] for rule in policy for port in rule["ports"]} == set(ports)


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_ask_for_health_at_the_socket_of_the_config(name):
    container, config = server_of(name)
    target = f"unix:{config['server']['unix_socket']}"
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"]:
        words = container[probe]["exec"]["command"]
        assert words[:3] == ["certkv", "--target", target]
        assert ("--alive" in words) == (probe != "readinessProbe")
        assert int(words[words.index("--timeout-ms") + 1]) < 1000 * container[probe]["timeoutSeconds"]
        # The command line knows these words: it gets as far as the missing server.
        command = [BUILD / "bin/certkv", "--target", "unix:/nonexistent", *words[3:]]
        assert subprocess.run(command, capture_output=True).returncode == 3


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_have_no_rights_and_have_resources(name):
    pod = pod_of(WORKLOADS[name])
    assert pod["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == security["fsGroup"] == 10001
    assert security["seccompProfile"]["type"] == "RuntimeDefault"
    for forbidden in ["hostNetwork", "hostPID", "hostIPC"]:
        assert forbidden not in pod
    for container in pod["containers"] + pod.get("initContainers", []):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert container["image"] == KUSTOMIZATION["images"][0]["name"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_path_of_the_config_is_mounted(name):
    container, config = server_of(name)
    pod = pod_of(WORKLOADS[name])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
    assert {mount["name"] for mount in mounts.values()} <= set(volumes) | {
        claim["metadata"]["name"] for claim in claims}
    texts = [container["args"][2]] + [str(v) for section in config.values() for v in section.values()]
    paths = [text for text in texts if text.startswith("/")]
    assert len(paths) >= 6
    for path in paths:
        folder = os.path.dirname(path)
        assert folder in mounts, path
        secret = volumes.get(mounts[folder]["name"], {}).get("secret")
        if secret is not None:
            assert os.path.basename(path) in [item["path"] for item in secret["items"]]
            assert secret["defaultMode"] == 0o440
    for folder in mounts:
        assert not any(other.startswith(f"{folder}/") for other in mounts), "a mount inside another"
    assert config["server"]["io_threads"] == int(container["resources"]["requests"]["cpu"])
    generated = [g["name"] for g in KUSTOMIZATION["configMapGenerator"]]
    maps = [v["configMap"]["name"] for v in volumes.values() if "configMap" in v]
    assert maps and set(maps) <= set(generated)


def test_the_stores_memory_and_disk_fit():
    container, config = server_of("certkv-kvstore")
    store = config["kvstore"]
    tiers = size(store["device_memory"]) + size(store["backing_memory"]) + size(store["staging_memory"])
    assert tiers <= size(store["memory_limit"])
    assert size(store["memory_limit"]) + 2 * 2**30 <= size(container["resources"]["limits"]["memory"])
    claim, = WORKLOADS["certkv-kvstore"]["spec"]["volumeClaimTemplates"]
    disk = size(claim["spec"]["resources"]["requests"]["storage"])
    assert disk >= 2 * size(store["spill_size"])
    drain = int(config["server"]["drain_timeout"].removesuffix("s"))
    # What was measured of RocksDB; see docs/decisions/0014-spill.md.
    writing = (size(store["device_memory"]) + size(store["backing_memory"])) / 0.12e9
    assert drain + writing < pod_of(WORKLOADS["certkv-kvstore"])["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_servers_read_what_the_pods_make_of_their_config(name, secrets, tmp_path):  # noqa: F811
    """Runs the init container's own script, then the server's --check-config."""
    container, _ = server_of(name)
    config = tmp_path / os.path.basename(container["args"][2])
    sample = FOLDER / "config" / config.name
    script = f"cp {sample} {config}"
    for init in pod_of(WORKLOADS[name]).get("initContainers", []):
        assert init["command"] == ["sh", "-ec"]
        script = init["args"][0].replace("/sample/", f"{FOLDER}/config/")
        script = script.replace("/etc/certkv/config/", f"{tmp_path}/")
    environment = dict(os.environ, POD_NAME="certkv-kvstore-0", REDIS_SERVICE_HOST="10.96.0.7",
                       REDIS_SERVICE_PORT="6379")
    run("sh", "-ec", script, env=environment)
    text = config.read_text()
    assert "POD_NAME" not in re.sub("#.*", "", text) and "REDIS_ADDRESS" not in re.sub("#.*", "", text)
    names = {"store": "store-gpu-07", "password": "redis-password", "http-token": "redis-password"}
    for path in set(re.findall(r"/etc/certkv/(?:tls|redis)/\S+", text)):
        stem, extension = os.path.splitext(os.path.basename(path))
        text = text.replace(path, str(secrets / (names.get(stem, stem) + extension)))
    config.write_text(text)
    out = run(BUILD / "bin" / container["args"][0], "--config", config, "--check-config")
    assert out == f"{config}: good\n"


@pytest.fixture(scope="module")
def built():
    """What kustomize makes of the folder."""
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            return run(*command, FOLDER)
    pytest.skip("needs kubectl or kustomize")


def test_kustomize_pins_configs_and_image(built):
    documents = list(yaml.safe_load_all(built))
    assert len(documents) == len(DOCUMENTS) + len(KUSTOMIZATION["configMapGenerator"])
    version = re.search(r"VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text().split("project(")[1])[1]
    assert f"image: certkv:{version}\n" in built
    maps = [d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"]
    for name in maps:
        assert re.fullmatch(r"certkv-\w+-\w{10}", name) and built.count(name) == 2


def test_published_schemas_accept_it(built, tmp_path):
    tool = ROOT / "build/deploy/venv/bin/kubernetes-validate"
    if not tool.exists():
        pytest.skip("needs kubernetes-validate in build/deploy/venv: see tests/deploy/kubernetes.lock")
    path = tmp_path / "built.yaml"
    path.write_text(built)
    out = subprocess.run([tool, "--strict", path], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stderr.count(" passed for resource ") + out.stdout.count(" passed for resource ") > 20
    path.write_text(built.replace("minReplicas: 3", "minReplicas: many"))
    assert subprocess.run([tool, "--strict", path], capture_output=True).returncode != 0


def test_the_other_signal_for_the_autoscaler_fits():
    """The adapter's rule and the patch that the README shows."""
    text = (FOLDER / "README.md").read_text()
    rule, patch = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    rule, = rule["rules"]
    series = rule["seriesQuery"].split("{")[0]
    assert f"| `{series}` | counter |" in (ROOT / "docs/metrics.md").read_text()
    patch, = patch
    assert of_kind(patch["target"]["kind"])[patch["target"]["name"]]
    operation, = yaml.safe_load(patch["patch"])
    assert operation["op"] == "add" and operation["path"] == "/spec/metrics/-"
    pods = operation["value"]["pods"]
    assert pods["metric"]["name"] == rule["name"]["as"]
    _, config = server_of("certkv-certifier")
    assert int(pods["target"]["averageValue"].removesuffix("m")) == 700 * config["server"]["io_threads"]
