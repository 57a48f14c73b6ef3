from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure

from esper.environment import parallel
from tests.fixtures_compose import quick_composition
from tests.fixtures_process import FORK_SERVER

torch.set_num_threads(1)  # the workers of the test run share the cores

settings.register_profile("esper", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("esper")

RENDER = Figure.draw


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the groups of long tests, so that both workers of the test run end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True, scope="session")
def blank_figures() -> Iterator[None]:
    """Build figures but do not render them, which would take most of the time of a tiny run or report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda figure, renderer: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_core() -> Iterator[None]:
    """Train hosts in this process and one thread unless a test wants more: worker processes take seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "available_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_workers() -> Iterator[None]:
    """Fork workers of this process from one that has imported esper; those of commands are started as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.environment.worker_runs.get_context", lambda method: FORK_SERVER)
        yield


@pytest.fixture(autouse=True, scope="session")
def quickly_composed() -> Iterator[None]:
    """Compose each choice of options once: Hydra would take most of the time of tests of the configuration."""
    with quick_composition():
        yield


@pytest.fixture
def rendered_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render figures, for a test that needs their pixels."""
    monkeypatch.setattr(Figure, "draw", RENDER)
