"""What every test starts from: a cache of its own, never the user's, and a Ctrl-C that is heard."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

# A shell's background job ignores Ctrl-C, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All tests of a worker process share one empty cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
