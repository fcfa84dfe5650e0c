"""The thread that syncs: whatever its job does, whoever waits for the job hears of its end."""

from __future__ import annotations

import pytest

from shardmq.shardd.store.errors import StoreFailed
from shardmq.shardd.store.sync import SyncJob
from shardmq.shardd.sync_threads import Syncer
from tests.support.faulty_files import FaultyFiles
from tests.support.readable import is_readable

PATIENCE_S = 60


class Ends:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self) -> None:
        raise self.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [MemoryError(), StoreFailed(), SystemExit()], ids=repr)
def test_the_end_of_a_job_is_told_however_it_ends(error: BaseException) -> None:
    syncer = Syncer("sync")
    syncer.start(Ends(error))
    assert is_readable(syncer.fd, PATIENCE_S)
    if isinstance(error, SystemExit):
        syncer.thread.join(PATIENCE_S)


@pytest.mark.parametrize("error", [OSError(), MemoryError(), ValueError(), SystemExit()], ids=repr)
def test_a_sync_that_did_not_come_to_its_end_is_no_success(error: BaseException) -> None:
    files = FaultyFiles()
    job = SyncJob(files=files, directory="d", paths=[], with_directory=True, noted=[])
    assert not job.synced
    # Fails on purpose.
    files.sync_directory = lambda path: Ends(error).run()  # type: ignore[method-assign]
    with pytest.raises((StoreFailed, SystemExit)):
        job.run()
    assert job.done and not job.synced


def test_a_sync_that_came_to_its_end_says_so() -> None:
    job = SyncJob(files=FaultyFiles(), directory="d", paths=[], with_directory=True, noted=[])
    job.run()
    assert job.done and job.synced
