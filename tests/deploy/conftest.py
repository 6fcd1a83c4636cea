"""Helm of both majors, once for all tests of this directory."""

import pytest
from helm_tool import Helm, get_helm


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Helm:
    return get_helm(request.param)


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """For tests of what is rendered, which is equal under both (`test_both_helms_render_the_same`)."""
    return get_helm(4)
