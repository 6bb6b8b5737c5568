"""Requests drawn from our own OpenAPI, as it has them and as it has not: refused perhaps, but never a server error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from served_api import ServedApi

from cb_server.routes import router
from cb_sglang.client import Sender

Drawn: TypeAlias = Case[Any]
EXAMPLES = 5
TIMEOUT_SECONDS = 60.0
VOCABULARY = 200_000
MOST_LATENT_STEPS = 2  # each is a step of the engine's
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
# Bounded and the same in every run: nothing is shrunk or remembered.
DRAWING = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def document() -> dict[str, Any]:
    app = FastAPI()
    app.include_router(router)
    return app.openapi()


def operations() -> dict[str, Any]:
    """By method and path."""
    schema: Any = schemathesis.openapi.from_dict(document())
    return {each.ok().label: each.ok() for each in schema.get_all_operations()}


OPERATIONS = operations()
WITH_BODY = [label for label in OPERATIONS if label.startswith("POST")]


@pytest.fixture(autouse=True)
def nothing_stays(server: ServedApi) -> Iterator[None]:
    """Other tests share the server: what was registered or pinned here is let go."""
    before = {sender.id for sender in server.client.list_senders()}
    yield
    for sender in server.client.list_senders():
        # One with a short lease may be gone by now.
        server.http.delete(f"/v1/senders/{sender.id}/pin")
        if sender.id not in before:
            server.http.delete(f"/v1/senders/{sender.id}")


def test_the_server_shows_our_operations_among_its_own(server: ServedApi) -> None:
    shown = server.http.get("/openapi.json").json()["paths"]
    for path, methods in document()["paths"].items():
        assert set(shown[path]) == set(methods)


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_schema_allows(server: ServedApi, sender: Sender, label: str) -> None:
    @DRAWING
    @given(OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def each(case: Drawn) -> None:
        _bounded(case)
        check_answer(server, case)
        _at_home(case, sender)
        check_answer(server, case)

    each()


@pytest.mark.parametrize("label", WITH_BODY)
def test_what_the_schema_forbids(server: ServedApi, sender: Sender, label: str) -> None:
    @DRAWING
    @given(OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def each(case: Drawn) -> None:
        if "sender_id" in case.path_parameters:
            case.path_parameters["sender_id"] = sender.id
        check_answer(server, case)

    each()


def check_answer(server: ServedApi, case: Drawn) -> None:
    """An answer that the document has, with our error shape when it is a refusal."""
    response = case.call(base_url=server.url, timeout=TIMEOUT_SECONDS)
    assert response.status_code < 500 or response.status_code == 503, (case.as_curl_command(), response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"], case.as_curl_command()
    case.validate_response(response, checks=CHECKS)


def _bounded(case: Drawn) -> None:
    body: Any = case.body
    if isinstance(body, dict) and "latent_steps" in body:
        body["latent_steps"] = int(body["latent_steps"]) % (1 + MOST_LATENT_STEPS)


def _at_home(case: Drawn, sender: Sender) -> None:
    """The same about a sender that is there, without what a schema cannot tell: ids, and which fields go together."""
    if "sender_id" in case.path_parameters:
        case.path_parameters["sender_id"] = sender.id
    drawn: Any = case.body
    if not isinstance(drawn, dict):
        return
    body = {name: value for name, value in drawn.items() if value is not None}
    for name in ("private", "inherits", "selector", "exclude", "since", "query_template"):
        body.pop(name, None)
    contents = [name for name in ("input_ids", "prompt", "messages") if name in body]
    sizes = [name for name in ("ratio", "budget", "coverage") if name in body]
    for name in (*contents[1:], *sizes[1:]):
        del body[name]
    if "input_ids" in body:
        body["input_ids"] = [int(token) % VOCABULARY for token in body["input_ids"]]
    if "senders" in body:
        body["senders"] = [sender.id]
    if "queries" in body:
        body["queries"] = [_query(each) for each in body["queries"]]
    case.body = body


def _query(query: Any) -> Any:
    if isinstance(query, dict):
        query = query["query"]
    return query if isinstance(query, str) else [int(token) % VOCABULARY for token in query]
