"""Reliability on the embedded model, one measurement a subcommand; docs/reliability.md has the figures.

python bench/reliability overload|soak|chat-latency|kill [options] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import chat_latency
import kill
import overload
import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("overload", help="three times the load that the server can carry")
    one.add_argument("--seconds", type=float, default=60.0, help="of overload")
    one.add_argument("--max-running-rows", type=int, default=overload.MAX_RUNNING_ROWS)
    one.add_argument("--max-waiting", type=int, default=overload.MAX_WAITING)
    one = commands.add_parser("soak", help="a mixed load, with memory, descriptors and KV sampled")
    one.add_argument("--minutes", type=float, default=10.0)
    one = commands.add_parser("chat-latency", help="a chat's inter-token latency beside queries")
    one.add_argument("--seconds", type=float, default=30.0, help="of each condition")
    one.add_argument("--max-running-rows", type=int, nargs="+", default=[64, 4_096])
    one = commands.add_parser("kill", help="SIGKILL during registrations, and what is there after a restart")
    one.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()

    if arguments.command == "overload":
        found = overload.run(arguments.seconds, arguments.max_running_rows, arguments.max_waiting, seed=arguments.seed)
    elif arguments.command == "soak":
        found = soak.run(60.0 * arguments.minutes, arguments.seed)
    elif arguments.command == "chat-latency":
        found = chat_latency.run(arguments.seconds, arguments.max_running_rows, arguments.seed)
    else:
        found = kill.run(arguments.times, arguments.seed)
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
