"""One Ray cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.ray.cluster import Cluster


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray")
    cluster = Cluster()
    yield cluster
    cluster.stop()
