"""Request: the account of one request at gate."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from certkv import _native


@dataclasses.dataclass(frozen=True)
class RiskSummary:
    """What gate knows of a request's risk; RequestRisk in proto/certkv/gate/v1/gate.proto.

    Attributes:
        request: "requests/{id}".
        closed: no more reads come.
        read_count: reads reported, one for each query head, layer and position.
        failed_read_count: reads that ended in an error.
        risk_score: largest total variation bound of a first read, before repair.
        max_worst_case_tv: largest bound of what was served.
        sum_worst_case_tv: their sum, rounded up.
        reads_certified_first: certified without repair; the next four by how far repair went.
        reads_exact: from originals alone.
        reads_observed: read_mode OBSERVE: outside tolerance and not repaired.
        repair_bytes: originals read again.
        canary_checks: used outputs that were compared with exact attention.
        canary_mismatches: of those, how many lay outside their bounds.
        budget: of the request's risk mode; 0 = none.
        budget_committed: given away or spent of it.
    """

    request: str
    closed: bool
    read_count: int
    failed_read_count: int
    risk_score: float
    max_worst_case_tv: float
    sum_worst_case_tv: float
    reads_certified_first: int
    reads_repaired_values: int
    reads_repaired_keys: int
    reads_repaired_head: int
    reads_repaired_layer: int
    reads_exact: int
    reads_observed: int
    repair_bytes: int
    canary_checks: int
    canary_mismatches: int
    budget: float
    budget_committed: float


# The product's defaults: Tolerances in kernels/core/policy.h.
_TOLERANCES = {
    "tv_tolerance": 0.2,
    "value_tolerance": 0.1,
    "output_tolerance": 0.0,
    "skip_tolerance": 0.0,
}


class Request:
    """One request at gate: its tolerances, its risk. Made by Client.open_request.

    Args:
        options: of the client.
        request_id: unique among open requests.
        tv_tolerance: largest total variation bound of a read, [0, 1].
        value_tolerance: largest value_term / value_radius of a read, >= 0.
        output_tolerance: largest output_error_bound, value units; 0 = no limit.
        skip_tolerance: part of tv_tolerance that a read may spend on skipping tokens, [0, 1).
            Where none of the four is given, gate's policy decides; they may only be tighter.
        read_mode: "ENFORCE" (certified, exact or an error), "EXACT" (originals only) or "OBSERVE"
            (measure only; needs gate's leave).
        label: free text for people.
        tenant: whose budget it shares; "" = the client's.
        model: for gate's policies by model.
        traceparent: W3C trace context into the servers' logs.

    Raises:
        InvalidArgumentError: [REQUEST_ID_INVALID | TOLERANCE_INVALID |
            READ_MODE_UNKNOWN].
        ResourceExhaustedError: [REQUEST_LIMIT].
        UnavailableError: gate can't be reached; Request.ungoverned reads on, exactly.
    """

    def __init__(
        self,
        options: dict[str, Any],
        request_id: str,
        *,
        tv_tolerance: Optional[float] = None,
        value_tolerance: Optional[float] = None,
        output_tolerance: Optional[float] = None,
        skip_tolerance: Optional[float] = None,
        read_mode: str = "ENFORCE",
        label: str = "",
        tenant: str = "",
        model: str = "",
        traceparent: str = "",
    ) -> None:
        given = {
            "tv_tolerance": tv_tolerance,
            "value_tolerance": value_tolerance,
            "output_tolerance": output_tolerance,
            "skip_tolerance": skip_tolerance,
        }
        given = {name: value for name, value in given.items() if value is not None}
        terms = {
            "tolerances": {**_TOLERANCES, **given} if given else None,
            "read_mode": read_mode,
            "label": label,
            "tenant": tenant,
            "model": model,
            "traceparent": traceparent,
        }
        self._native = _native.open_request(options, request_id, terms)

    @classmethod
    def ungoverned(cls, request_id: str) -> Request:
        """A request without gate: every read is exact. For engines that go on when gate is down."""
        request = cls.__new__(cls)
        request._native = _native.ungoverned_request(request_id)
        return request

    def risk(self) -> RiskSummary:
        """What gate knows now. Certificates arrive there in batches: flush() first for all."""
        return RiskSummary(**self._native.risk())

    def flush(self) -> None:
        """Waits until gate has acknowledged all that was reported.

        Raises:
            UnavailableError: [GATE_UNREACHABLE].
            DeadlineExceededError: [REPORT_TIMEOUT].
        """
        self._native.flush()

    def finish(self) -> RiskSummary:
        """Flushes, closes at gate, and returns the final account. The object is closed then."""
        return RiskSummary(**self._native.finish())

    def close(self) -> None:
        """As finish(), without the account and without errors. Idempotent."""
        self._native.close()

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
