"""One Ray cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import plain_outputs  # noqa: F401
from tests.ray.cluster import Cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray")
    cluster = Cluster()
    yield cluster
    cluster.stop()
