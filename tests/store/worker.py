"""A process that works on a store until it is killed: ``python -m tests.store.worker DIRECTORY MODEL FIRST COUNT``.

Stores pages FIRST, FIRST + 1, ... and prints the number of each page once it is acknowledged. With COUNT 0 it goes on
for ever; else it then prints "done" and waits for a line on its standard input.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tests.support import HostPool, content, key, namespace, tier

SHAPE = (16, 4, 2, 64)
SETTINGS = {"capacity": "32MiB", "segment_size": "1MiB"}


def main(directory: str, model: str, first: int, count: int) -> None:
    """Work as the arguments say."""
    opened = tier(Path(directory), **SETTINGS)
    pool = HostPool(1, shape=SHAPE)
    space = namespace(opened, pool.geometry, model)
    print("open", flush=True)
    for name in itertools.islice(itertools.count(first), count or None):
        pool.fill(0, content(name, pool.geometry))
        if opened.put(space, [key(name)], [pool.page(0)])[0]:
            print(name, flush=True)
    print("done", flush=True)
    sys.stdin.readline()
    opened.store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
