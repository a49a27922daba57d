"""The command ``lmcache-mp``: parses, calls, prints."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import textwrap
from collections.abc import Sequence

from lmcache_mp import doctor
from lmcache_mp.arguments import check_seconds
from lmcache_mp.errors import UsageError
from lmcache_mp.probes import wait_until_up

_WIDTH = 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status (argparse itself leaves by SystemExit)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UsageError as error:
        print(f"{options.usage}lmcache-mp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmcache-mp")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_doctor(commands.add_parser("doctor", help="check servers and this machine for a run"))
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check what a run needs. Only the servers that are named are looked at, and this machine. "
        "The exit status is 1 if a run would fail."
    )
    parser.add_argument("--engine", metavar="URL", help="vLLM: http://host:8000")
    parser.add_argument("--lmcache", metavar="URL", help="LMCache's messages: tcp://host:5555")
    parser.add_argument("--lmcache-http", metavar="URL", help="LMCache's HTTP: http://host:8080")
    parser.add_argument("--model", metavar="NAME", help="the name that connect() will be given")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=0.0, help="wait for servers that start"
    )
    parser.add_argument("--json", action="store_true", help="the findings as a JSON list")
    parser.set_defaults(run=_doctor, usage=parser.format_usage())


def _doctor(options: argparse.Namespace) -> int:
    targets = doctor.Targets(options.engine, options.lmcache, options.lmcache_http, options.model)
    seconds = check_seconds(options.wait, "--wait")
    wait_until_up(targets.addresses, seconds, lambda line: print(line, file=sys.stderr, flush=True))
    findings = doctor.examine(targets)
    if options.json:
        print(json.dumps([dataclasses.asdict(it) for it in findings], indent=2))
    else:
        print(_report(findings))
    return 1 if doctor.would_fail(findings) else 0


def _report(findings: Sequence[doctor.Finding]) -> str:
    """Findings by area, in columns: state, check, what was found, and what to do below it."""
    names = max(len(it.check) for it in findings)
    lines: list[str] = []
    for area, group in itertools.groupby(findings, key=lambda it: it.area):
        lines += [*([""] if lines else []), area]
        for it in group:
            begin = f"  {it.state:<7}  {it.check:<{names}}  "
            lines += _folded(it.text, begin, " " * len(begin))
            if it.advice:
                lines += _folded(it.advice, " " * len(begin) + "-> ", " " * (len(begin) + 3))
    return "\n".join(lines)


def _folded(text: str, begin: str, indent: str) -> list[str]:
    """``text`` in lines of the terminal; what a server sent may hold control characters."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(
        shown,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
