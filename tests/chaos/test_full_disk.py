"""Nothing can be written to the log: nobody but the log's reader notices."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.chaos.checks import asked, assert_none_failed, under_load


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_the_disk_of_the_logs_is_full(start, questions):
    with start(log=Path("/dev/full")) as stack:
        first, second = stack.tulips
        assert_none_failed(under_load(stack, questions, first.kill))
        first.start()
        stack.wait_for_replicas(2)
        first.inject("forward.1")
        second.inject("forward.1")
        spoilt, *others = asked(stack, itertools.islice(questions, 3)).outcomes
        assert spoilt.status in (424, 500), spoilt.detail  # each family's own
        assert [other.status for other in others] == [200, 200]
        assert [service.terminate() for service in stack.services] == [0, 0, 0]
