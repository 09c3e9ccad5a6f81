"""Runs resolver calls in a process of its own, so that a signal is a result and not the end.

Reads one JSON job a line: {"call", "segments", "field", "lo", "hi", "options"}; answers each with a
line: what came, or the error with its attributes; and how long it took. The first line has the
resolver's roots and parameters. A job {"do": PYTHON} runs a statement in between.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from payload import PayloadError, Ragged, Resolver, decode_segments


def values(result: Any) -> Any:
    if isinstance(result, dict):
        return {field: [values(one) for one in found] for field, found in result.items()}
    if isinstance(result, Ragged):
        return [row.tolist() for row in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


def answer(resolver: Resolver, job: dict[str, Any]) -> dict[str, Any]:
    segments = decode_segments(job["segments"])
    window = segments, job.get("field"), job.get("lo"), job.get("hi")
    options = job.get("options", {})
    began = time.monotonic()
    try:
        if job["call"] == "view":
            got = [resolver.view(segment) for segment in segments]
            result = [values(one) for one in got] if job.get("touch", True) else len(got)
        elif job["call"] == "resolve":
            result = values(resolver.resolve(segments))
        else:
            result = values(getattr(resolver, job["call"])(*window, **options))
    except PayloadError as error:
        names = ("reason", "retryable", "index", "field", "path", "offset", "expected", "actual")
        found = {name: getattr(error, name) for name in names}
        found |= {"error": type(error).__name__, "message": str(error)}
        found["errors"] = [one.index for one in error.errors]
        return found | {"seconds": time.monotonic() - began}
    return {"result": result, "seconds": time.monotonic() - began}


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    with Resolver(setup["roots"], **setup["options"]) as resolver:
        for line in sys.stdin:
            job = json.loads(line)
            if "do" in job:
                exec(job["do"], {"resolver": resolver})
                found: dict[str, Any] = {}
            else:
                found = answer(resolver, job)
            stats = resolver.stats()
            found["stats"] = {name: getattr(stats, name) for name in stats.__struct_fields__}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
