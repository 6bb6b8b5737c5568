"""The plain openai package against cb-sglang: nothing of ours is imported, one extra field is sent.

cb-sglang serve        # in another terminal
python examples/openai_client.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from openai import OpenAI, OpenAIError

DOCUMENTS = [
    "Room plan. The seminar on tides moved from room 12 to the old library. The lift is out of order until Friday.",
    "Mail from Dr. Okafor: my seminar on tides starts at 16:15, not at 16:00; I teach until four. Bring the charts.",
]
QUESTION = "Where and when does the seminar on tides start?"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where cb-sglang listens")
    arguments = parser.parse_args(argv)
    try:
        with OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none", max_retries=0) as client:
            run(client)
    except OpenAIError as error:
        print(f"openai_client: {arguments.url}: {error}", file=sys.stderr)
        return 1
    return 0


def run(client: OpenAI) -> None:
    # Registering a sender is an endpoint of ours; the package can post to any.
    senders = [client.post("/senders", cast_to=dict[str, Any], body={"prompt": text})["id"] for text in DOCUMENTS]
    print(f"Senders: {', '.join(senders)}")

    raw = client.chat.completions.with_raw_response.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=0,
        extra_body={"cacheback": {"senders": senders, "ratio": 2}},
    )
    completion = raw.parse()
    print(f"Answered from the messages {raw.headers['X-CacheBack-Messages']}:")
    print(f"    {(completion.choices[0].message.content or '').strip()}")


if __name__ == "__main__":
    sys.exit(main())
