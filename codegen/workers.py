"""Work on as many threads as there are processors, in a way that a signal can end at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: seconds between two looks at whether something is done: far less than a kernel takes to compile
_LOOK_SECONDS = 0.01


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """What `work` gives for each item, in order.

    An exception, or an iterator that is closed, waits for what is being worked on, not for what has not begun.

    The waiting is done here and not in a lock of `threading`: a signal raises only where no lock can be left taken (see
    `v41c.cli`).
    """
    with ThreadPoolExecutor(processors()) as pool:
        try:
            for future in [pool.submit(work, item) for item in items]:
                yield _awaited(future)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _awaited(future: Future[Result]) -> Result:
    while not future.done():
        time.sleep(_LOOK_SECONDS)
    return future.result()
