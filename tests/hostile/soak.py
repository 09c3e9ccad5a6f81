"""A million segments over 20,000 files with 256 descriptors: ``python soak.py SEGMENTS FILES ROOT``.

Descriptors and resident memory at the end must be what they were after the first hundredth.
"""

import json
import os
import random
import resource
import sys

import numpy as np

from payload import Resolver, Segment

ROW = 96


def resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def main(segments: int, files: int, root: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    paths = []
    for number in range(files):
        directory = f"{root}/v{number % 100}"
        if number < 100:
            os.makedirs(directory)
        paths.append(f"{directory}/{number}.bin")
        with open(paths[-1], "wb") as file:
            file.write(((np.arange(64 * ROW) + number) % 251).astype(np.uint8).tobytes())
    whole = (np.arange(64 * ROW + 251) % 251).astype(np.uint8)
    draw = random.Random(0)
    early = (0, 0)
    # From 3.13 on a map needs no descriptor, so by default more are kept: there the limit is asked for.
    max_maps = 128 if sys.version_info >= (3, 13) else None
    with Resolver(root, max_maps=max_maps) as resolver:
        for number in range(segments):
            which, row = draw.randrange(files), draw.randrange(60)
            one = Segment("routed_experts", paths[which], row * ROW, row, 4, "uint8", (48, 2))
            view = resolver.view(one)
            start = (row * ROW + which) % 251
            if view.tobytes() != whole[start : start + 4 * ROW].tobytes():
                raise AssertionError(f"segment {number} is wrong")
            del view
            if number == segments // 100:
                early = len(os.listdir("/proc/self/fd")), resident()
        late = len(os.listdir("/proc/self/fd")), resident()
        stats = resolver.stats()
    print(json.dumps({
        "segments": segments, "files": files, "fallbacks": stats.fallbacks, "live_maps": stats.live_maps,
        "descriptors": [early[0], late[0]], "resident": [early[1], late[1]],
    }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
