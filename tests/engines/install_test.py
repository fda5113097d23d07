"""`pip install ./clients/python` in a fresh environment, and what it then has."""

import importlib.metadata
import json
import pathlib
import subprocess
import time

import pytest
from conftest import ROOT

USE = """
import json, pathlib, certkv, numpy as np
from importlib.metadata import entry_points

root = pathlib.Path(certkv.__file__).parent
spec = certkv.CacheSpec.uniform("m", layer_count=1, kv_head_count=1, group_size=1, head_dim=64)
keys = np.random.default_rng(1).standard_normal((100, 1, 64)).astype(np.float16)
with certkv.embedded() as server, certkv.Client(spec, server.target) as client:
    sequence = client.put_sequence(list(range(100)), [(keys, keys)])
    with client.open_request("installed") as request:
        read = client.attention(sequence, request).attend(0, 99, keys[99].astype(np.float32))
print(json.dumps({
    "folder": str(root),
    "outcome": int(read.certificates["outcome"][0]),
    "bytes": sum(file.stat().st_size for file in root.rglob("*") if file.is_file()),
    "plugins": {
        group: [point.value for point in entry_points(group=group, name="certkv")]
        for group in ("vllm.general_plugins", "sglang.srt.plugins")
    },
}))
"""


@pytest.mark.long
def test_pip_installs_what_a_user_needs(tmp_path, capsys):
    venv = tmp_path / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    began = time.monotonic()
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
         ROOT / "clients" / "python"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    seconds = time.monotonic() - began
    assert installed.returncode == 0, installed.stderr[-3000:]
    # Beside other folders of the same name, the package that was installed is used.
    used = subprocess.run(
        [python, "-c", USE], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin"}
    )
    assert used.returncode == 0, used.stderr[-3000:]
    said = json.loads(used.stdout)
    assert pathlib.Path(said["folder"]).is_relative_to(venv)
    assert said["outcome"] in (1, 2)  # certified or exact
    # The same as the build folder's, which the other tests use.
    built = {
        point.group: [point.value]
        for point in importlib.metadata.distribution("certkv").entry_points
    }
    assert said["plugins"] == built
    with capsys.disabled():
        print(f"\npip install ./clients/python: {seconds:.0f} s, {said['bytes'] / 2**20:.0f} MiB")
