"""The entry point "sglang.srt.plugins" of the package: SGLang calls register() in each process."""

from __future__ import annotations

from typing import Any

NAME = "certkv"
"""Of the attention backend: --attention-backend certkv."""


def register() -> None:
    """Makes the attention backend known to SGLang. It is imported when it is chosen."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make)


def _make(runner: Any) -> Any:
    from certkv._sglang_attention import CertKVAttnBackend

    return CertKVAttnBackend(runner)
