"""What `generate` raises of its own; the engine's own HTTP errors pass unchanged."""

from __future__ import annotations

from typing import Any


class OverlongPromptError(Exception):
    """The prompt is longer than the engine's context window; nothing was sent.

    Attributes
    ----------
    prompt_len, max_prompt_len : int
        Tokens.
    """

    def __init__(self, *, prompt_len: int, max_prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self.max_prompt_len = max_prompt_len
        super().__init__(
            f"prompt has {prompt_len} tokens, the engine takes at most {max_prompt_len}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _overlong, (self.prompt_len, self.max_prompt_len)


def _overlong(prompt_len: int, max_prompt_len: int) -> OverlongPromptError:
    return OverlongPromptError(prompt_len=prompt_len, max_prompt_len=max_prompt_len)


class MalformedGenerateResponseError(ValueError):
    """The response is not what the generate endpoint promises; the message names the place."""
