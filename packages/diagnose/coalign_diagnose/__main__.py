"""`coalign-diagnose LOGS`: what `coalign diagnose` says, on a machine without Coalign."""

from __future__ import annotations

import argparse
import sys

from coalign_diagnose.report import diagnose


def main() -> None:
    """Name the cause of a run that ended badly. Exit code 1: the logs hold none that it knows; 2: none can be read."""
    parser = argparse.ArgumentParser(prog="coalign-diagnose", description="Names why a training run ended badly.")
    parser.add_argument(
        "logs", nargs="+", help="a run's folder, log files, directories of the logs of many ranks, or -"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    try:
        answer, code = diagnose(arguments.logs, as_json=arguments.json)
    except (OSError, ValueError) as problem:
        parser.exit(2, f"error: {problem}\n")
    print(answer)  # noqa: T201
    sys.exit(code)


if __name__ == "__main__":
    main()
