"""How the API server refuses."""

from __future__ import annotations

from typing import Any

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, message: str, *, reason: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message
        self.reason = reason or _REASONS.get(status, "Unknown")
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """The Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.status,
        }
