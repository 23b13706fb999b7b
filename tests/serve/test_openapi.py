"""The service against its own OpenAPI description: what schemathesis makes of it, right and wrong."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from adaptivit.serve import Service
from tests.support.models import pictures, tiny
from tests.support.serving import Running, photo, running

pytestmark = pytest.mark.xdist_group("serve")

PATHS = ("/healthz", "/metrics", "/v1/classify", "/v2", "/v2/models/{name}", "/v2/models/{name}/infer")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    model = tiny("aht", beta=-1.0)
    model.calibrate(pictures(16))
    with running(Service(model, wait=0.0), with_page=False) as found:
        yield found


def test_the_service_keeps_to_its_description(live: Running) -> None:
    some = st.one_of(st.sampled_from([photo(), photo(1, (50, 41), "JPEG")]), st.binary(max_size=40))
    schemathesis.openapi.format("binary", some)
    schemathesis.openapi.format("byte", some.map(lambda data: base64.b64encode(data).decode()))
    described = schemathesis.openapi.from_url(f"{live.address}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert {operation.path for operation in operations} >= set(PATHS)
    kept = settings(
        max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    seen: set[tuple[str, int]] = set()

    def check(case: Any, name: str) -> None:
        if case.path_parameters:
            case.path_parameters["name"] = name
        answer = case.call()
        seen.add((case.operation.path, answer.status_code))
        case.validate_response(answer, checks=CHECKS)

    for operation in operations:
        for mode in GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE]:
            names = st.sampled_from(["adaptivit", "adaptivit", "other"])
            kept(given(operation.as_strategy(generation_mode=mode), names)(check))()
    assert {("/v1/classify", code) for code in (200, 400, 422)} <= seen
    assert {("/v2/models/{name}/infer", code) for code in (400, 404, 422)} <= seen
