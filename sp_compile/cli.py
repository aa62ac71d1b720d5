"""Run the command line: `python -m sp_compile explain|verify|plan module:function`.

The function returns (model, args) or (model, args, kwargs): the model and its arguments, with global shapes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.planner.explain import explain
from sp_compile.planner.page import page
from sp_compile.planner.plan import plan
from sp_compile.planner.report_json import plan_json, report_json

from .verify import verify

TOLERANCE = 1e-3  # default of --tolerance, a relative error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        0 on success; 1 if `verify` finds a larger error than allowed or `plan` finds that nothing fits; 2 for invalid
        input, with an error of one line.
    """
    args, others = _make_parser().parse_known_args(argv)
    try:
        if others:
            raise SpError("SP731", f"{args.command}: unknown argument {' '.join(others)!r}{_memory_command(args)}.")
        for path in filter(None, (args.json, args.html)):
            _check_writable(path)
        return _run_command(args)
    except OSError as error:  # errors that the earlier check did not detect
        sys.stderr.write(f"sp_compile {args.command}: {_cannot_write(error.filename, error)}\n")
        return 2
    except SpError as error:
        sys.stderr.write(f"sp_compile {args.command}: {error}\n")
        return 2


def _run_command(args: argparse.Namespace) -> int:
    """Run a parsed command, write its results, and return the exit status."""
    ranks = _parse_ranks(args.ranks) if args.command == "plan" else []
    model, inputs, kwargs = _call_target(args.target)
    options = dict(map(_parse_option, args.option))
    given: dict[str, Any] = {"kwargs": kwargs}
    if args.command == "plan":
        given |= {"memory": args.memory, "ranks": ranks, "host_memory": args.host_memory}
    else:
        given |= {"sp": args.sp, **({"memory": True} if args.command == "explain" else {})}
    if both := sorted(given.keys() & options.keys()):
        raise SpError("SP732", f"--option {both[0]}: an argument of {args.command}{_memory_command(args)}.")
    if args.command == "plan":
        made = plan(model, inputs, **given, **options)
        text, found, failed = str(made), plan_json(made), not any(row.fits for row in made.rows)
    else:
        entry: Callable[..., Any] = explain if args.command == "explain" else verify
        report = entry(model, *inputs, **given, **options)
        text, found = str(report), report_json(report)
        failed = args.command == "verify" and not report.worst <= args.tolerance
    sys.stdout.write(text + "\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(found))
    return int(failed)


def _memory_command(args: argparse.Namespace) -> str:
    return " (explain always predicts the memory)" if args.command == "explain" else ""


def _check_writable(path: Path) -> None:
    """Raise SpError if the file cannot be written.

    The check runs before the work, which may take minutes.
    """
    there = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None
    if not there:
        path.unlink()


def _cannot_write(path: Any, error: OSError) -> SpError:
    return SpError("SP733", f"{path}: the file cannot be written ({error.strerror}).")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sp_compile", description="Show the effect of sequence parallelism on a model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("explain", "show rewrites, collectives and memory of a rank"),
        ("verify", "compare results and gradients of simulated ranks with a single device"),
        ("plan", "list the configurations that fit in memory, with their predicted times"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("target", help="module:function that returns (model, args) or (model, args, kwargs)")
        one.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="a backend option; repeatable"
        )
        one.add_argument("--json", type=Path, help="also write the report to this JSON file")
        one.add_argument("--html", type=Path, help="also write the report to this HTML file")
        if name == "plan":
            one.add_argument("--memory", default="80GB", help="memory of a device, in bytes or with a unit")
            one.add_argument("--host-memory", help="host memory for each rank, if it is limited")
            one.add_argument(
                "--ranks", nargs="+", default=["8,16,64"], help="numbers of ranks to compare, such as 8 16 64"
            )
        else:
            one.add_argument("--sp", type=int, default=2, help="number of ranks that share the sequence")
        if name == "verify":
            one.add_argument("--tolerance", type=float, default=TOLERANCE, help="the largest relative error")
    return parser


def _call_target(target: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return the result of the function; raise SpError if it is missing or returns something else."""
    module, _, name = target.partition(":")
    sys.path[:0] = [""] if "" not in sys.path else []
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpError("SP734", f"target: expected module:function, got {target!r}: {str(error).rstrip('.')}.") from None
    found = function()
    form = isinstance(found, tuple) and 2 <= len(found) <= 3 and isinstance(found[1], tuple | list)
    if not form or not isinstance(found[-1], dict if len(found) == 3 else tuple | list):
        raise SpError("SP735", f"target: expected {target!r} to return (model, args) or (model, args, kwargs).")
    return found[0], found[1], found[2] if len(found) == 3 else {}


def _parse_ranks(texts: Sequence[str]) -> list[int]:
    """Parse numbers separated by commas or spaces."""
    found = [one for text in texts for one in text.split(",") if one]
    if not found or not all(one.isdecimal() for one in found):
        raise SpError("SP711", f"--ranks: expected numbers of ranks such as 8 16 64, got {' '.join(texts)!r}.")
    return list(map(int, found))


def _parse_option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, where the value is a Python literal or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SpError("SP731", f"--option: expected NAME=VALUE such as attention=ring, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
