"""CacheSpec.from_file: what the command line writes is the spec that the client makes."""

import dataclasses
import json
import os
import pathlib
import subprocess

import certkv
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "smollm2-135m-4-layers.safetensors"


def calibrate(path, *arguments):
    program = pathlib.Path(certkv.find_certkvd()).with_name("certkv")
    command = [program, "calibrate", TRACE, "--spec", path, *arguments]
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))


def test_the_file_of_the_command_line_is_the_spec(tmp_path):
    path = tmp_path / "spec.json"
    calibrate(path, "--formats", "K6V8w4", "--coverage", "0.01")
    layer = certkv.LayerSpec("K6", "V8", witness_bands=4)
    expected = certkv.CacheSpec(
        "SmolLM2-135M-Instruct",
        kv_head_count=3,
        group_size=3,
        head_dim=64,
        value_dim=64,
        layers=(layer,) * 4,
        rope_pairing="interleaved",
        rotary_dim=64,
        rope_theta=100000.0,
        logit_scale=0.125,
    )
    read = certkv.CacheSpec.from_file(path)
    assert read == expected and read.digest == expected.digest
    other = dataclasses.replace(expected, layers=(layer,) * 3 + (certkv.LayerSpec(),))
    assert read.digest != other.digest


def test_weights_of_a_witness_are_by_head_and_channel(tmp_path):
    path = tmp_path / "spec.json"
    calibrate(path, "--formats", "K8V4w1")
    fields = json.loads(path.read_text())
    flat = [2.0 ** (n % 5 - 2) for n in range(3 * 64)]
    fields["layers"][1]["witness_weights"] = flat
    path.write_text(json.dumps(fields))
    weights = certkv.CacheSpec.from_file(path).layers[1].witness_weights
    assert len(weights) == 3 and weights[2] == tuple(flat[128:])
    fields["layers"][1]["witness_weights"] = flat[1:]
    path.write_text(json.dumps(fields))
    with pytest.raises(certkv.InvalidArgumentError, match="191 witness weights for 3 heads"):
        certkv.CacheSpec.from_file(path)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": None},
        {"layers": [{"key_format": "KEY_FORMAT_K7"}]},
        {"head_dim": 65},
        {"unknown": 1},
        {"original_dtype": "ORIGINAL_DTYPE_F8"},
    ],
)
def test_what_is_no_spec_is_refused(tmp_path, change):
    path = tmp_path / "spec.json"
    calibrate(path, "--formats", "K8V4")
    fields = json.loads(path.read_text())
    certkv.CacheSpec.from_file(path)
    path.write_text(json.dumps({**fields, **change}))
    with pytest.raises(certkv.InvalidArgumentError, match="CACHE_SPEC_INVALID"):
        certkv.CacheSpec.from_file(path)
    path.write_text("[]")
    with pytest.raises(certkv.InvalidArgumentError, match="calibrate --spec"):
        certkv.CacheSpec.from_file(path)
