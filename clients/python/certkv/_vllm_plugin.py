"""The entry point "vllm.general_plugins" of the package: vLLM calls register() in each process."""

from __future__ import annotations

BACKEND = "certkv._vllm_attention.CertKVAttentionBackend"


def register() -> None:
    """Puts CertKV's attention in the place of vLLM's for CPUs.

    It is vLLM's own, unless the engine has a CertKVConnector with "decode": "certified". Versions
    of vLLM that it wasn't tested with keep theirs. vLLM's module is imported when a model is.
    """
    import vllm

    from certkv import _engine
    from certkv._errors import Error
    from certkv._vllm_versions import TESTED_VERSIONS

    try:
        _engine.check_version("vllm", vllm.__version__, TESTED_VERSIONS)
    except Error:
        return  # the connector says so, where it is asked for
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
