"""What the integrations of engines share: errors, and which versions were tested."""

from __future__ import annotations

import os

from certkv import _errors


def unsupported(what: str) -> _errors.Error:
    return _errors.error_of("INVALID_ARGUMENT", "ENGINE_UNSUPPORTED", what)


def check_version(engine: str, version: str, tested: str) -> None:
    """Raises InvalidArgumentError [ENGINE_UNSUPPORTED] unless `version` is one of `tested`.x, or
    CERTKV_ANY_VERSION=1."""
    if version.startswith(tested + ".") or os.environ.get("CERTKV_ANY_VERSION") == "1":
        return
    raise unsupported(
        f"{engine} is {version}, tested is {tested}.x; install that, or set "
        "CERTKV_ANY_VERSION=1 to try"
    )
