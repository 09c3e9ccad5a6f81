"""Generation over HTTP with side arrays by handle: `generate` passes ``payload`` through untouched."""

from ._response import parse_generate_response
from .errors import MalformedGenerateResponseError, OverlongPromptError
from .generate import generate

__all__ = [
    "MalformedGenerateResponseError",
    "OverlongPromptError",
    "generate",
    "parse_generate_response",
]
