"""No proxy and no waiting between retries."""

from __future__ import annotations

import pytest
import urllib3

from headrace.artifact import web


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    retries = urllib3.Retry(connect=0, read=0, status=0, redirect=2, raise_on_status=False)
    monkeypatch.setattr(web, "RETRIES", retries)
