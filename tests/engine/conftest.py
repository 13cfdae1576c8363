"""What the tests of this folder share."""

import pytest

from tests.support.engines import PlainOutputs


@pytest.fixture(scope="session")
def plain_outputs() -> PlainOutputs:
    return PlainOutputs()
