"""What the integrations of engines share: errors, and which versions were tested."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from typing import Any, TypeVar

from certkv import _errors

_Options = TypeVar("_Options")

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def unsupported(what: str) -> _errors.Error:
    return _errors.error_of("INVALID_ARGUMENT", "ENGINE_UNSUPPORTED", what)


def check_version(engine: str, version: str, tested: str) -> None:
    """Raises InvalidArgumentError [ENGINE_UNSUPPORTED] unless `version` is `tested` or one of
    `tested`.x, or CERTKV_ANY_VERSION=1."""
    if f"{version}.".startswith(tested + ".") or os.environ.get("CERTKV_ANY_VERSION") == "1":
        return
    raise unsupported(
        f"{engine} is {version}, tested is {tested}.x; install that, or set "
        "CERTKV_ANY_VERSION=1 to try"
    )


def read_options(kind: type[_Options], given: dict[str, Any], where: str) -> _Options:
    """A dataclass of strings, integers and dicts, from what an engine's setting `where` holds.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], naming the option.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise unsupported(f"{where} has '{name}'; known are {', '.join(known)}")
        wanted = {"str": str, "int": int}.get(known[name].type, dict)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise unsupported(f"{where}: {name} is {value!r}, must be a {wanted.__name__}")
    return kind(**given)


def weights_fingerprint(model: str, config: str, option: str) -> str:
    """32 hex digits that differ between models: of the config and a sample of every weight file.

    Blocks are shared between runs whose models have one name, so the name must tell weights apart.
    Of each file its size and 256 samples of 4 KiB are hashed, evenly spaced: a fine-tune differs, a
    handful of numbers that were edited by hand may not; the model can be named by `option` then.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], no local folder or file of weights.
    """
    path = pathlib.Path(model)
    if path.is_dir():
        files = sorted({file for pattern in _WEIGHT_FILES for file in path.glob(pattern)})
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise unsupported(
            f"the model '{model}' is no local folder or file with weights, so its blocks can't be "
            f"named by them; set {option} to name and revision"
        )
    digest = hashlib.sha256(config.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as weights:
            for sample in range(_SAMPLES):
                weights.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
