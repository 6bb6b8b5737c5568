"""Every encoding on the real engine: what travels, and that a receiver reads the same from each."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from served_api import excerpt

from cb_sglang.client import Sender
from cb_sglang.payload import MEDIA_TYPE, decode_batch, from_base64

QUESTION = "How many square miles did the United States gain?"


def messages(http: httpx.Client, sender: Sender | str, *queries: Any, **options: Any) -> list[dict[str, Any]]:
    name = sender if isinstance(sender, str) else sender.id
    answer = http.post(f"/v1/senders/{name}/messages", json={"queries": list(queries) or [QUESTION], **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]  # type: ignore[no-any-return]


def completion(http: httpx.Client, **cacheback: Any) -> dict[str, Any]:
    body = {
        "model": "gemma-3-270m",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
        "cacheback": cacheback,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def latent_sender(http: httpx.Client, steps: int = 4) -> dict[str, Any]:
    answer = http.post("/v1/senders", json={"prompt": excerpt("polk_1848")[:1_500], "latent_steps": steps})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_receiver_reads_the_same_from_ids_embeddings_and_mixed(http: httpx.Client, sender: Sender) -> None:
    made = [messages(http, sender, encoding=name, budget=96)[0] for name in ("token_ids", "embeddings", "mixed")]
    assert made[0]["positions"] == made[1]["positions"] == made[2]["positions"]
    answers = [completion(http, messages=[message]) for message in made]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] and texts[0] == texts[1] == texts[2]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1


def test_payloads_are_safetensors_and_json_has_no_rows(http: httpx.Client, sender: Sender) -> None:
    (message,) = messages(http, sender, encoding="embeddings", budget=32)
    payload = from_base64(message["payload"])
    assert list(payload.positions) == message["positions"] and payload.rows is not None
    assert message["token_ids"] is None and payload.token_ids is None
    assert message["payload_bytes"] == len(payload.rows.data) == 32 * payload.rows.hidden * 4
    assert message["size"]["against_embeddings"] == 1.0 < message["size"]["against_full_kv"]


def test_the_binary_form_is_one_file_for_all_queries(http: httpx.Client, sender: Sender) -> None:
    path, body = f"/v1/senders/{sender.id}/messages", {"queries": [QUESTION, "Which river?"], "budget": 48}
    plain = http.post(path, json=body).json()["data"]
    answer = http.post(path, json=body, headers={"Accept": MEDIA_TYPE})
    assert answer.headers["content-type"] == MEDIA_TYPE
    decoded = decode_batch(answer.content)
    assert [list(each.positions) for each in decoded] == [each["positions"] for each in plain]
    assert [list(each.token_ids or ()) for each in decoded] == [each["token_ids"] for each in plain]
    refused = http.post(path, json={**body, "stream": True}, headers={"Accept": MEDIA_TYPE})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


def test_latent_rows_are_kept_sent_and_never_rolled_again(http: httpx.Client) -> None:
    sender = latent_sender(http)
    total, first = sender["positions"], sender["positions"] - 4
    assert sender["latent"] == 4
    for budget in (5, 64):
        (message,) = messages(http, sender["id"], budget=budget)
        assert message["encoding"] == "mixed" and message["positions"][-4:] == list(range(first, total))
        assert message["cached_positions"] == total, "tokens and latent rows come from the cache"
        payload = from_base64(message["payload"])
        assert payload.rows is not None and len(payload.rows) == 4
    assert latent_sender(http)["id"] == sender["id"]
    text = messages(http, sender["id"], budget=64, encoding="text")[0]["text"]
    assert text and "<pad>" not in text
    refused = http.post(f"/v1/senders/{sender['id']}/messages", json={"queries": ["x"], "encoding": "token_ids"})
    assert refused.status_code == 400 and "mixed or embeddings" in refused.json()["error"]["message"]
    small = http.post(f"/v1/senders/{sender['id']}/messages", json={"queries": ["x"], "budget": 4})
    assert small.status_code == 400 and small.json()["error"]["code"] == "invalid_budget"


def test_latent_rows_travel_through_a_chain(http: httpx.Client) -> None:
    (message,) = messages(http, latent_sender(http)["id"], budget=40)
    answer = http.post("/v1/senders", json={"inherits": [message], "prompt": " The next agent's own notes."})
    assert answer.status_code == 200, answer.text
    sender = answer.json()
    assert sender["inherited"] == 40
    (onward,) = messages(http, sender["id"], ratio=4)
    assert onward["budget"]["positions"] == 40 + -(-(sender["positions"] - 40) // 4)
    assert completion(http, messages=[onward])["choices"][0]["message"]["content"] is not None


@pytest.mark.parametrize(
    ("field", "what"), [("model_fingerprint", "another model"), ("tokenizer_fingerprint", "another tokenizer")]
)
def test_foreign_messages_are_refused_unless_text(http: httpx.Client, sender: Sender, field: str, what: str) -> None:
    (message,) = messages(http, sender, budget=32)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json={**body, "cacheback": {"messages": [{**message, field: "0" * 64}]}})
    assert answer.status_code == 400 and what in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "cacheback.messages[0]"
    (text,) = messages(http, sender, budget=32, encoding="text")
    assert completion(http, messages=[{**text, field: "0" * 64}])["choices"]
