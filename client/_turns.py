"""Calls of one event loop take turns, so that hundreds at once leave it to others.

Answers that arrive together would else be decoded in one round of the loop. Those that wait stand in
a queue and a few are called each round: each that was woken in vain would cost the loop as well.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from itertools import count
from typing import Final

# Seconds our calls work before the event loop sees to everything else.
SHARE: Final = 0.002
# Calls woken a round: those beyond the share wait again, at their old place.
_WOKEN: Final = 16


class _Turns:
    __slots__ = ("spent", "taken", "tickets", "turning", "waiting")

    def __init__(self) -> None:
        self.spent = 0.0  # seconds of this round
        self.tickets = count()
        self.taken = False  # whether calls that waited have this round
        self.turning = False  # whether the next round is asked for
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a round: wake those who come first."""
        self.spent = 0.0
        self.turning = False
        self.taken = bool(self.waiting)
        for _ in range(min(_WOKEN, len(self.waiting))):
            woken = heapq.heappop(self.waiting)[1]
            if not woken.done():  # cancelled
                woken.set_result(None)
        if self.taken:  # they may wait again, or never work
            self.ask(loop)

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self.turning:
            self.turning = True
            loop.call_soon(self.begin, loop)


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()


def _of(loop: asyncio.AbstractEventLoop) -> _Turns:
    turns = _turns.get(loop)
    if turns is None:
        for ref in _turns.keyrefs():  # what waited in a loop that was closed holds it
            other = ref()
            if other is not None and other.is_closed():
                _turns.pop(other, None)
        turns = _turns[loop] = _Turns()
    return turns


async def turn() -> None:
    """Wait while our calls have had their share of this round of the event loop."""
    loop = asyncio.get_running_loop()
    turns = _of(loop)
    if turns.spent < SHARE and not turns.waiting and not turns.taken:
        return
    ticket = next(turns.tickets)
    while True:
        woken = loop.create_future()
        heapq.heappush(turns.waiting, (ticket, woken))
        await woken
        if turns.spent < SHARE:
            return


def worked(seconds: float) -> None:
    """Count work of a call in this round of the running event loop."""
    loop = asyncio.get_running_loop()
    turns = _of(loop)
    turns.spent += seconds
    turns.ask(loop)
