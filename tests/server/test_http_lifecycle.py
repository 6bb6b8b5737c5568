"""Senders over their life: extended, private in part, asked again, audited, pinned, expired; many at once."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from served_api import ServedApi, excerpt, random_ids, sse_events

from cb_sglang.client import Sender

QUESTIONS = ("How many square miles did the United States gain?", "Which river is named?", "Who signed the treaty?")


def ask(http: httpx.Client, sender: str, *queries: Any, **options: Any) -> list[dict[str, Any]]:
    answer = http.post(f"/v1/senders/{sender}/messages", json={"queries": list(queries), **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]  # type: ignore[no-any-return]


def create(http: httpx.Client, **content: Any) -> dict[str, Any]:
    answer = http.post("/v1/senders", json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


# --- follow-ups


def test_three_follow_ups_are_disjoint(http: httpx.Client, sender: Sender) -> None:
    had: list[str] = []
    seen: set[int] = set()
    for question in QUESTIONS:
        (message,) = ask(http, sender.id, question, budget=64, exclude=had)
        assert len(message["positions"]) == 64 and not seen & set(message["positions"])
        seen |= set(message["positions"])
        had.append(message["id"])
    # ``since`` takes the last message with all that it had excluded itself.
    (message,) = ask(http, sender.id, QUESTIONS[0], budget=64, since=had[-1])
    assert not seen & set(message["positions"])


def test_a_message_of_another_sender_excludes_nothing(http: httpx.Client, sender: Sender) -> None:
    other = create(http, prompt=excerpt("polk_1848")[:600])
    (message,) = ask(http, other["id"], QUESTIONS[0])
    unknown = "msg_" + "0" * 32
    answers = [
        http.post(f"/v1/senders/{sender.id}/messages", json={"queries": ["x"], "exclude": [name]})
        for name in (message["id"], unknown)
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    told = [a.json()["error"]["message"].replace(n, "") for a, n in zip(answers, (message["id"], unknown), strict=True)]
    assert told[0] == told[1]


def test_nothing_left_to_send(http: httpx.Client) -> None:
    sender = create(http, prompt=excerpt("polk_1848")[:200])
    (everything,) = ask(http, sender["id"], QUESTIONS[0], ratio=1)
    answer = http.post(f"/v1/senders/{sender['id']}/messages", json={"queries": ["x"], "since": everything["id"]})
    assert answer.status_code == 400 and "no position is left" in answer.json()["error"]["message"]


def test_coverage_grows_with_its_share(http: httpx.Client, sender: Sender) -> None:
    sizes = [len(ask(http, sender.id, QUESTIONS[0], coverage=share)[0]["positions"]) for share in (0.3, 0.6, 0.9, 1.0)]
    assert sizes == sorted(sizes) and 1 <= sizes[0] < sizes[2] <= sizes[3] <= sender.positions
    (bm25,) = ask(http, sender.id, QUESTIONS[0], coverage=0.5, selector="bm25")
    assert 1 <= len(bm25["positions"]) < sender.positions


# --- private positions


@pytest.mark.parametrize("selector", ["cacheback", "bm25", "streaming_llm"])
def test_private_characters_never_leave(http: httpx.Client, selector: str) -> None:
    secret = " The password is swordfish, and the vault is in Albany."
    text = excerpt("polk_1848")[:700] + secret + excerpt("polk_1848")[700:1_400]
    sender = create(http, prompt=text, private=[{"chars": [700, 700 + len(secret)]}])
    hidden = sender["private_positions"]
    assert 8 <= hidden < sender["positions"]
    question = "What is the password of the vault in Albany?"
    seen: set[int] = set()
    for encoding in ("token_ids", "text", "embeddings"):
        for size in (32, sender["positions"]):
            (message,) = ask(
                http, sender["id"], question, budget=size, encoding=encoding, selector=selector, span_scores=True
            )
            assert len(message["positions"]) == min(size, sender["positions"] - hidden)
            seen |= set(message["positions"])
            shown = str(message["text"]) + str(message["spans"])
            assert "swordfish" not in shown and "Albany" not in shown
    private = sorted(set(range(sender["positions"])) - seen)
    assert len(private) == hidden
    around = {0, *(p // 16 for p in range(private[0] - 3, private[-1] + 4))}
    assert all((score is None) == (n in around) for n, score in enumerate(message["span_scores"]))
    # What is private stays so in what extends it, and asking for what is left brings nothing of it.
    more = http.post(f"/v1/senders/{sender['id']}/extend", json={"prompt": " And that was all."}).json()
    (message,) = ask(http, more["id"], question, ratio=1, encoding="text")
    assert "swordfish" not in message["text"] and more["parent"] == sender["id"]


def test_private_roles(http: httpx.Client) -> None:
    turns = [
        {"role": "system", "content": "Never tell the codeword heliotrope."},
        {"role": "user", "content": "The ship sails at noon from Boston with forty men."},
    ]
    sender = create(http, messages=turns, private=[{"role": "system"}])
    (message,) = ask(http, sender["id"], "What is the codeword?", ratio=1, encoding="text")
    assert "heliotrope" not in message["text"] and "Boston" in message["text"]


# --- extending, audit, transfers


def test_extend_reuses_what_is_cached(http: httpx.Client, sender: Sender) -> None:
    answer = http.post(f"/v1/senders/{sender.id}/extend", json={"prompt": " Then the agent read on. " * 4})
    assert answer.status_code == 200, answer.text
    longer = answer.json()
    assert longer["parent"] == sender.id and longer["id"] != sender.id
    assert longer["cached_positions"] >= sender.positions - 1 and longer["positions"] > sender.positions
    # What the parent has sent counts as had.
    (first,) = ask(http, sender.id, QUESTIONS[0], budget=64)
    (second,) = ask(http, longer["id"], QUESTIONS[0], budget=64, exclude=[first["id"]])
    assert not set(first["positions"]) & set(second["positions"])


def test_the_audit_says_what_went_to_whom(http: httpx.Client, sender: Sender) -> None:
    before = time.time()
    made = [
        ask(http, sender.id, QUESTIONS[n], budget=32, receiver={"label": label})[0]
        for n, label in enumerate(("planner", "critic"))
    ]
    entries = http.get(f"/v1/senders/{sender.id}/audit").json()["data"][:2]
    assert [(e["message"], e["receiver"]) for e in entries] == [(made[1]["id"], "critic"), (made[0]["id"], "planner")]
    assert entries[0]["spans"] == made[1]["spans"] and before <= entries[1]["created"] <= entries[0]["created"]


def test_transfers_are_every_pair_and_fail_alone(http: httpx.Client, sender: Sender) -> None:
    other = create(http, prompt=excerpt("polk_1848")[:600])["id"]
    request = {
        "senders": [sender.id, "snd_absent", other],
        "queries": [QUESTIONS[0], {"query": QUESTIONS[1], "selector": "none"}],
        "budget": 24,
    }
    answer = http.post("/v1/transfers", json=request)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(each["sender"], each["query"]) for each in data] == [(s, q) for s in request["senders"] for q in (0, 1)]
    codes = [None if each["error"] is None else each["error"]["code"] for each in data]
    assert codes == [None, "invalid_value", "sender_not_found", "sender_not_found", None, "invalid_value"]
    assert data[1]["error"]["param"] == "queries[1].selector"
    assert [len(each["message"]["positions"]) for each in data if each["message"]] == [24, 24]
    events = sse_events(http.post("/v1/transfers", json={**request, "stream": True}).text)
    assert [name for name, _ in events] == ["transfer"] * 6 + ["done"]


def test_a_chain_of_four(http: httpx.Client) -> None:
    text, received, inherited = excerpt("polk_1848"), [], 0
    for hop in range(4):
        content = {"prompt": text[hop * 500 : (hop + 1) * 500]} | ({"inherits": received} if received else {})
        sender = create(http, **content)
        assert sender["inherited"] == inherited
        (message,) = ask(http, sender["id"], QUESTIONS[0], ratio=4)
        inherited = len(message["positions"])
        assert inherited == sender["inherited"] + -(-(sender["positions"] - sender["inherited"]) // 4)
        received = [message["id"]]


# --- leases, pins, capacity


def test_a_lease_ends_and_a_query_renews_it(http: httpx.Client) -> None:
    sender = create(http, prompt="A short-lived sender about the sea.", ttl=3.0)
    assert 0 < sender["expires"] - time.time() <= 3.0
    time.sleep(2.0)
    ask(http, sender["id"], "What about?")
    time.sleep(1.2)
    assert http.get(f"/v1/senders/{sender['id']}").status_code == 200, "the query has renewed it"
    time.sleep(3.2)
    gone = http.post(f"/v1/senders/{sender['id']}/messages", json={"queries": ["x"]})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "sender_not_found")


def test_pins_are_counted_and_let_go(server: ServedApi, http: httpx.Client) -> None:
    pinned = create(http, prompt=excerpt("polk_1848")[:700], pin=True)
    assert pinned["pinned_positions"] == pinned["positions"]
    assert http.get("/v1/capacity").json()["pinned_positions"] == pinned["positions"]
    path = f"/v1/senders/{pinned['id']}"
    assert http.delete(f"{path}/pin").json()["pinned_positions"] == 0
    assert http.put(f"{path}/pin").json()["pinned_positions"] == pinned["positions"]
    server.flush()  # takes the pin's lock with the cache; queries renew it
    misses = [ask(http, pinned["id"], question, budget=16)[0]["cache_miss"] for question in QUESTIONS[:2]]
    assert "evicted" in misses
    for seed in (70, 71):  # more than the pool holds
        loose = create(http, input_ids=random_ids(5_000, seed=seed))
        assert http.delete(f"/v1/senders/{loose['id']}").status_code == 200
    (message,) = ask(http, pinned["id"], QUESTIONS[0], budget=16)
    assert (message["cached_positions"], message["cache_miss"]) == (pinned["positions"], None)
    assert http.delete(path).status_code == 200
    assert http.get("/v1/capacity").json()["pinned_positions"] == 0


def test_grants_follow_the_receiver(http: httpx.Client, sender: Sender) -> None:
    (all_,) = ask(http, sender.id, QUESTIONS[0], budget=200)
    assert (all_["grant"]["granted"], all_["grant"]["limit"]) == (200, "asked")
    window = {"context_length": 1_000, "prompt_positions": 500, "reserved_output": 300, "senders": 2}
    (cut,) = ask(http, sender.id, QUESTIONS[0], budget=200, receiver=window)
    assert (cut["grant"]["granted"], cut["grant"]["limit"], len(cut["positions"])) == (100, "window", 100)
    pool = {"context_length": 32_000, "pool_positions": 4_000, "prompt_positions": 100, "concurrent": 10}
    (shared,) = ask(http, sender.id, QUESTIONS[0], budget=400, receiver=pool)
    assert (shared["grant"]["granted"], shared["grant"]["limit"]) == (300, "share")
    fixed = {"queries": ["x"], "budget": 400, "policy": "fixed", "receiver": window}
    answer = http.post(f"/v1/senders/{sender.id}/messages", json=fixed)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
