"""Follow-ups: a receiver asks the same sender three times and never gets a position twice.

cb-sglang serve        # in another terminal
python examples/follow_up.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cb_sglang.client import CacheBack, Message
from cb_sglang.errors import CacheBackError

DOCUMENT = (
    "Minutes of the garden club. Present: Adebayo, Brandt, Chen, Dufour. The club has 1,204 crowns. Chen bought "
    "forty tulip bulbs for 310 crowns; they go along the south wall. Brandt wants a second compost heap. "
    "The shed door was repaired by Dufour on 3 March. Adebayo found the lock of the well broken and ordered another. "
    "The summer feast is on 21 June, behind the greenhouse, whatever the weather. Everybody brings a chair and a dish. "
    "Dufour plays the accordion. The next meeting is on the first Tuesday of May, at Brandt's."
)
QUESTIONS = ["When and where is the summer feast?", "What did the tulips cost?", "What is broken, and who saw it?"]
BUDGET = 32


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where cb-sglang listens")
    arguments = parser.parse_args(argv)
    try:
        with CacheBack(arguments.url) as server:
            run(server)
    except CacheBackError as error:
        print(f"follow_up: {arguments.url}: {error.message}", file=sys.stderr)
        return 1
    return 0


def run(server: CacheBack) -> list[Message]:
    """The three messages; no two of them share a position."""
    sender = server.create_sender(prompt=DOCUMENT)
    had: list[Message] = []
    for question in QUESTIONS:
        # exclude names every message that this receiver has. since=had[-1] would say the same: that message,
        # and all that it excluded itself.
        (message,) = server.messages(sender, [question], budget=BUDGET, encoding="text", exclude=had)
        print(f"{question}\n    {message.text}")
        had.append(message)
    sent = [position for message in had for position in message.positions]
    print(f"{len(sent)} of {sender.positions} positions were sent, {len(sent) - len(set(sent))} of them twice.")
    return had


if __name__ == "__main__":
    sys.exit(main())
