"""A chain of four agents: each reads its own part of a story behind the message of the agent before it.

cb-sglang serve        # in another terminal
python examples/chain.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cb_sglang.client import CacheBack
from cb_sglang.errors import CacheBackError

PARTS = [
    "Monday. Ines put the brass key of the tower into the blue teapot. It rained, and the market was cancelled. "
    "Her brother painted the fence green.",
    "Tuesday. The blue teapot was sold at the flea market, with four cups, to a clockmaker named Oswald. The bakery "
    "had no rolls left by nine.",
    "Wednesday. Oswald the clockmaker moved his shop to Mill Street 9 and took everything along but the old sofa. "
    "The bridge was closed for an hour.",
    "Thursday. Mill Street 9 has a cellar that stays dry. Oswald keeps there what he does not sell: clocks without "
    "hands, and the teapot. The post came late.",
]
QUESTION = "Where is the key of the tower now, and how did it get there?"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where cb-sglang listens")
    arguments = parser.parse_args(argv)
    try:
        with CacheBack(arguments.url) as server:
            run(server)
    except CacheBackError as error:
        print(f"chain: {arguments.url}: {error.message}", file=sys.stderr)
        return 1
    return 0


def run(server: CacheBack) -> None:
    # One call: four registrations and four messages. With a ratio of 2, each hop may pass on as many positions as
    # it inherited, and half of its own; which of them they are, the question decides.
    for number, hop in enumerate(server.chain(PARTS, QUESTION, ratio=2, encoding="text"), start=1):
        sender, message = hop.sender, hop.message
        print(f"hop {number}: {sender.positions} positions, {sender.inherited} of them inherited")
        print(f"    passes on {message.budget.positions}: {message.text}")


if __name__ == "__main__":
    sys.exit(main())
