"""What the tests of this folder share."""

from pathlib import Path

import pytest

from tests.support.engines import PlainOutputs
from tests.support.models import save_random_draft


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory) -> Path:
    """A draft that knows nothing: untrained weights, the embedded pair's vocabulary."""
    return save_random_draft(tmp_path_factory.mktemp("random-draft"))


@pytest.fixture(scope="session")
def plain_outputs() -> PlainOutputs:
    return PlainOutputs()
