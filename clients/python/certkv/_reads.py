"""Attention: certified reads, and what is known of each."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import numpy as np

from certkv import _native
from certkv._errors import Error


class Rung(enum.IntEnum):
    """How far up the repair ladder a read went."""

    NONE = 1
    VALUES = 2
    KEYS = 3
    HEAD = 4
    LAYER = 5


class Outcome(enum.IntEnum):
    """What an output is. OBSERVED comes in read_mode OBSERVE only."""

    CERTIFIED = 1
    EXACT = 2
    OBSERVED = 3


CERTIFICATE_DTYPE: np.dtype = _native.CERTIFICATE_DTYPE
"""Fields of a certificate: one row for each query head of a read.

layer, query_head, query_position: which read.
worst_case_tv: upper bound on the total variation between exact and served softmax, [0, 1].
output_error_bound: upper bound on the 2-norm of the output's error, value units, maybe infinite.
value_term, value_radius: parts of it, value units.
rung, outcome: values of Rung and Outcome.
first_worst_case_tv: worst_case_tv of the first read, before repair.
repair_bytes: originals read again for this head.
failure_probability: chance that the bounds don't hold; above 0 only of K8D keys under a union budget.
key_format, value_format: codes of docs/formats.md; 0 = not said.
read_tokens, skipped_tokens, read_bytes: how much was read in the pass that was accepted.
skipped_share: the part of worst_case_tv that skipped tokens cost.
"""


class ReadRequest(NamedTuple):
    """One read: one layer, all query heads, at one position.

    Attributes:
        layer: index of the layer.
        query_position: tokens 0 .. query_position are read, or the layer's window.
        queries: float32 [query_head_count, head_dim], after RoPE, before the logit scale.
        sink_logits: float32 [query_head_count] in nats, or None.
    """

    layer: int
    query_position: int
    queries: Any
    sink_logits: Any = None


def native_reads(reads: Iterable[ReadRequest]) -> list[tuple[int, int, Any, Any]]:
    return [tuple(ReadRequest(*read)) for read in reads]


class Read:
    """The result of one read. An output is certified within tolerance, or exact, or an error."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def error(self) -> Optional[Error]:
        """Why there is no output, or None."""
        return self._native.error()

    @property
    def outputs(self) -> np.ndarray:
        """float32 [query_head_count, value_dim], without a copy. Raises `error` if there is one."""
        return self._native.outputs()

    @property
    def certificates(self) -> np.ndarray:
        """[query_head_count] rows of CERTIFICATE_DTYPE. Raises `error` if there is one."""
        return self._native.certificates()

    @property
    def in_process(self) -> bool:
        """Read in this process, because the certifier couldn't be used."""
        return self._native.in_process

    @property
    def canary(self) -> bool:
        """Gate asks for a comparison of what is used: hand that to Attention.check_used."""
        return self._native.canary

    @property
    def read_time_ns(self) -> int:
        """How long the kernels took, repairs included."""
        return self._native.read_time_ns


class Attention:
    """Certified reads of one sequence for one request. Made by Client.attention.

    Calls are safe from several threads, one runs at a time (together with those of the sequence).
    """

    def __init__(self, sequence: Any, request: Any) -> None:
        self._native = _native.open_attention(sequence, request)

    def attend(
        self, layer: int, query_position: int, queries: Any, sink_logits: Any = None
    ) -> Read:
        """One read, see ReadRequest for shapes. Its certificates are reported to gate.

        Raises:
            Error: the read has no output that is certified within tolerance or exact.
            InvalidArgumentError: [ARRAY_INVALID | READ_INVALID].
        """
        read = self.attend_many([ReadRequest(layer, query_position, queries, sink_logits)])[0]
        if read.error is not None:
            raise read.error
        return read

    def attend_many(self, reads: Iterable[ReadRequest]) -> list[Read]:
        """Several reads in one exchange; one result each, in order.

        A read that failed has its `error`, and raises it when its outputs are asked for.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | READ_INVALID], none was done.
        """
        return [Read(native) for native in self._native.attend(native_reads(reads))]

    def refresh(self) -> None:
        """Tells the certifier of tokens that were appended to the sequence since.

        Raises:
            FailedPreconditionError: [LEASE_LOST].
            AbortedError: [BLOCK_REUSED].
        """
        self._native.refresh()

    def check_used(self, request: ReadRequest, read: Read, used: Any) -> None:
        """Compares the outputs that the engine used with exact attention, and reports to gate.

        Args:
            request: what was asked.
            read: what came.
            used: float32 [query_head_count, value_dim], as the engine's next step saw them.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | READ_INVALID]; others as Sequence.attend_exact.
        """
        self._native.check_used(native_reads([request]), read._native, used)

    def close(self) -> None:
        """Closes the view at the certifier. Idempotent."""
        self._native.close()

    def __enter__(self) -> Attention:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
