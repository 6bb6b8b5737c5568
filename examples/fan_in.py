"""Fan-in: three agents have read a report each; a fourth answers one question from what matters in all three.

cb-sglang serve        # in another terminal
python examples/fan_in.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cb_sglang.client import CacheBack
from cb_sglang.errors import CacheBackError

REPORTS = {
    "harbour": "Harbour log, Tuesday. The ferry Arnica left Vik at 06:40 with 112 passengers. Two cranes were greased. "
    "At 09:15 the captain reported water in the engine room and turned back. The canteen ran out of rye bread.",
    "workshop": "Workshop log, Tuesday. Three bicycles were repaired. The pump of the Arnica was opened at 11:00; its "
    "impeller was cracked. A new one comes from Bergen on Thursday. The lathe needs a belt.",
    "office": "Office log, Tuesday. The printer is broken again. All Arnica passengers were booked on the coach at "
    "12:30, at the company's cost. The accountant is away until Monday.",
}
QUESTION = "What happened to the ferry Arnica, why, and how did its passengers travel on?"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where cb-sglang listens")
    arguments = parser.parse_args(argv)
    try:
        with CacheBack(arguments.url) as server:
            run(server)
    except CacheBackError as error:
        print(f"fan_in: {arguments.url}: {error.message}", file=sys.stderr)
        return 1
    return 0


def run(server: CacheBack) -> None:
    senders = {server.create_sender(prompt=text).id: name for name, text in REPORTS.items()}

    # Every sender with every question in one call; a pair that fails does not spoil the others.
    messages = []
    for transfer in server.transfers(list(senders), [QUESTION], ratio=2, encoding="text"):
        if transfer.message is None:
            raise CacheBackError(f"the {senders[transfer.sender]} has no message: {transfer.error}")
        message = transfer.message
        print(f"{senders[message.sender]}: {message.budget.positions} of {message.sender_positions} positions")
        print(f"    {message.text}")
        messages.append(message)

    turns = [{"role": "user", "content": QUESTION}]
    completion = server.chat(turns, received=messages, max_tokens=64, temperature=0)
    print(f"Answer, from {len(completion.message_ids)} messages in {completion.prompt_tokens} prompt tokens:")
    print(f"    {completion.text.strip()}")


if __name__ == "__main__":
    sys.exit(main())
