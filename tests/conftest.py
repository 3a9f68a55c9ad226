"""Shared by all tests: threads, and the rule that CI accepts no skip for a missing component."""

import os
from collections.abc import Generator

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside another worker, threads that wait for each other cost more than they do: here and in processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
torch.set_num_threads(min(torch.get_num_threads(), 2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With DSPARK_LAB_REQUIRE_COMPONENTS set, a test that skips fails: its component was to be there. CI has no GPU."""
    report = yield
    if report.skipped and os.environ.get("DSPARK_LAB_REQUIRE_COMPONENTS") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped where every component is required: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("DSPARK_LAB_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
