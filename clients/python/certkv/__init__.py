"""CertKV: a quantized KV cache whose every attention read carries a proven bound.

    with certkv.embedded() as server, certkv.Client(spec, server.target) as client:
        sequence = client.put_sequence(token_ids, layers)
        with client.open_request("request-7", tv_tolerance=0.1) as request:
            attention = client.attention(sequence, request)
            read = attention.attend(layer, sequence.token_count - 1, queries)
            read.outputs, read.certificates["worst_case_tv"]

An output is certified within tolerance, or exact, or an exception. `certkv.aio` has the same for
asyncio.
"""

from certkv._block_chain import BlockChain, block_elements
from certkv._client import Client, Sequence
from certkv._embedded import EmbeddedServer, embedded, find_certkvd
from certkv._errors import (
    AbortedError,
    DataLossError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from certkv._native import VERSION as __version__
from certkv._native import default_target
from certkv._paged_cache import PagedCache, StagedBlocks
from certkv._reads import CERTIFICATE_DTYPE, Attention, Outcome, Read, ReadRequest, Rung
from certkv._request import Request, RiskSummary
from certkv._spec import CacheSpec, LayerSpec

__all__ = [
    "AbortedError",
    "Attention",
    "BlockChain",
    "CERTIFICATE_DTYPE",
    "CacheSpec",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "EmbeddedServer",
    "Error",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "LayerSpec",
    "NotFoundError",
    "Outcome",
    "PagedCache",
    "PermissionDeniedError",
    "Read",
    "ReadRequest",
    "Request",
    "ResourceExhaustedError",
    "RiskSummary",
    "Rung",
    "Sequence",
    "StagedBlocks",
    "UnauthenticatedError",
    "UnavailableError",
    "__version__",
    "block_elements",
    "default_target",
    "embedded",
    "find_certkvd",
]
