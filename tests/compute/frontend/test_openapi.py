"""Requests made up from the published document: none of them is a 500."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from compute.frontend.apis.openapi import document
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import RunningFrontend, running_frontend
from tests.support.scripted_compute import scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
SCHEMA = schemathesis.openapi.from_dict(document("demo"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def web() -> Iterator[RunningFrontend]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    fingerprint = open_checkpoint(DEMO).fingerprint
    with (
        scripted_compute(directory, fingerprint=fingerprint, max_waiting=64) as compute,
        running_frontend(directory) as web,
    ):
        compute.says = [300, 301, 1]
        web.joined()
        yield web
    shutil.rmtree(directory)


QUICK = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@SCHEMA.parametrize()
@QUICK
def test_no_request_is_a_server_error(case: schemathesis.Case, web: RunningFrontend) -> None:
    case.call_and_validate(base_url=web.url, checks=CHECKS)


@pytest.mark.accept
@SCHEMA.parametrize()
@settings(QUICK, max_examples=500, derandomize=False)
def test_none_of_many_requests_is_a_server_error(
    case: schemathesis.Case, web: RunningFrontend
) -> None:
    case.call_and_validate(base_url=web.url, checks=CHECKS)
