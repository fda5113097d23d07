"""Errors: every one has a code, which says what to do next, and a reason of docs/errors.md."""

from __future__ import annotations


class Error(Exception):
    """An error of CertKV.

    Attributes:
        code: what the caller does next, as in gRPC: "INVALID_ARGUMENT", "UNAVAILABLE", ...
        reason: what happened, a word of docs/errors.md such as "STORE_FULL"; "" when gRPC itself
            made the error (no server listens, a deadline has passed).
        message: the thing, the value seen, the limit and the remedy, for people.
        retry_delay_ms: nothing was done, and the call may be made again after so long; 0 = the
            error doesn't say.
    """

    def __init__(self, code: str, reason: str, message: str, retry_delay_ms: int = 0) -> None:
        super().__init__(code, reason, message, retry_delay_ms)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_delay_ms = retry_delay_ms

    def __str__(self) -> str:
        reason = f" [{self.reason}]" if self.reason else ""
        return f"{self.code}{reason} {self.message}"


class InvalidArgumentError(Error, ValueError):
    """Fix the call."""


class NotFoundError(Error, LookupError):
    """What was asked for isn't there."""


class FailedPreconditionError(Error):
    """Fix the state: attach again, look up again."""


class AbortedError(Error):
    """A block was reused meanwhile: look the sequence up again."""


class ResourceExhaustedError(Error):
    """Wait, see `retry_delay_ms`, or ask for less."""


class UnavailableError(Error):
    """A server can't be reached. Reads that can be exact in this process are; this one can't."""


class DeadlineExceededError(Error):
    """A server didn't answer in time."""


class PermissionDeniedError(Error):
    """The identity may not do that."""


class UnauthenticatedError(Error):
    """The server wants to know who calls: a token or a certificate."""


class DataLossError(Error):
    """Stored bytes changed and couldn't be repaired. Nothing of them was served."""


class InternalError(Error):
    """A defect of CertKV, or of what it runs on."""


_CLASSES = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "FAILED_PRECONDITION": FailedPreconditionError,
    "ABORTED": AbortedError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "DATA_LOSS": DataLossError,
    "INTERNAL": InternalError,
}


def error_of(code: str, reason: str, message: str, retry_delay_ms: int = 0) -> Error:
    """The exception of an error, of the class of its code."""
    return _CLASSES.get(code, Error)(code, reason, message, retry_delay_ms)
