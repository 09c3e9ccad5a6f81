"""Generation over HTTP with side arrays by handle: `generate` passes ``payload`` through untouched."""

from ._response import parse_generate_response
from .errors import MalformedGenerateResponseError, OverlongPromptError
from .generate import generate, generate_sync
from .status import PayloadStatus, payload_status

__all__ = [
    "MalformedGenerateResponseError",
    "OverlongPromptError",
    "PayloadStatus",
    "generate",
    "generate_sync",
    "parse_generate_response",
    "payload_status",
]
