"""Work on several threads: results in order, and nothing begun after an end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from v41c.codegen.workers import in_parallel, processors


def test_results_are_in_the_order_of_the_items() -> None:
    def late_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0)
        return number * number

    assert list(in_parallel(late_first, range(9))) == [number * number for number in range(9)]
    assert list(in_parallel(late_first, [])) == []


@pytest.mark.parametrize("closed", [False, True])
def test_what_has_not_begun_never_begins(tmp_path: Path, closed: bool) -> None:
    """After an error of an item, and where nobody wants the rest."""

    def write(number: int) -> None:
        if number == 1 and not closed:
            raise ValueError("one of them")
        (tmp_path / str(number)).touch()
        time.sleep(0.02)

    results = in_parallel(write, range(1000))
    if closed:
        next(results)
        results.close()
    else:
        with pytest.raises(ValueError, match="one of them"):
            list(results)
    begun = len(list(tmp_path.iterdir()))
    assert 0 < begun < 10 * processors() + 10
    time.sleep(0.1)
    assert len(list(tmp_path.iterdir())) == begun
