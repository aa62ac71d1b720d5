"""Run the command line: `python -m sp_compile explain|verify|plan module:function`, `selftest`, or `run script`.

The function returns (model, args) or (model, args, kwargs): the model and its arguments, with global shapes. `run` runs
a training script whose Trainers share sequences.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.planner.explain import explain
from sp_compile.planner.page import page
from sp_compile.planner.plan import plan
from sp_compile.planner.report_json import plan_json, report_json

from .integrations.run_script import prepare_script
from .selftest.launch import selftest, selftest_table
from .verify import verify

TOLERANCE = 1e-3  # default of --tolerance, a relative error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        0 on success; 1 if `verify` or `selftest` finds a larger error than allowed or `plan` finds that nothing fits;
        2 for invalid input, with an error of one line.
    """
    args, unknown = _make_parser().parse_known_args(argv)
    try:
        if unknown:
            cause = f"{args.command}: unknown argument {' '.join(unknown)!r}."
            raise SpError("SP731", cause, _memory_fix(args.command, unknown[0]))  # a fix for --memory, None for others
        if args.command == "run":
            options = dict(map(_parse_option, args.option))
            run = prepare_script(args.target, args.arguments, is_module=args.module, options=options)
        else:
            for path in filter(None, (args.json, getattr(args, "html", None))):
                _check_writable(path)
            return _run_selftest(args) if args.command == "selftest" else _run_command(args)
    except OSError as error:  # a write that failed although `_check_writable` has succeeded, such as on a full disk
        sys.stderr.write(f"sp_compile {args.command}: {_cannot_write(error.filename, error)}\n")
        return 2
    except SpError as error:
        sys.stderr.write(f"sp_compile {args.command}: {error}\n")
        return 2
    run()  # outside of `try`: exceptions of the script are the user's
    return 0


def _run_selftest(args: argparse.Namespace) -> int:
    """Run `selftest`, write its results, and return the exit status."""
    found = selftest(args.ranks, args.device, args.compiler)
    sys.stdout.write(f"{selftest_table(found)}\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(row["is_right"] for row in found["results"]))


def _run_command(args: argparse.Namespace) -> int:
    """Run a parsed command on a target, write its results, and return the exit status."""
    ranks = _parse_ranks(args.ranks) if args.command == "plan" else []
    model, inputs, kwargs = _call_target(args.target)
    options = dict(map(_parse_option, args.option))
    arguments: dict[str, Any] = {"kwargs": kwargs}
    if args.command == "plan":
        arguments |= {"memory": args.memory, "ranks": ranks, "host_memory": args.host_memory}
    else:
        arguments["sp"] = args.sp
    if args.command == "explain":
        arguments["memory"] = True
    _check_no_arguments(args.command, options, arguments)  # no option may have the name of one of `arguments`
    if args.command == "plan":
        result: Any = plan(model, inputs, **arguments, **options)
        data, failed = plan_json(result), not any(row.fits for row in result.rows)
    else:
        command: Callable[..., Any] = explain if args.command == "explain" else verify
        result = command(model, *inputs, **arguments, **options)
        data = report_json(result)
        failed = args.command == "verify" and not result.worst <= args.tolerance  # an error of NaN fails
    sys.stdout.write(f"{result}\n")
    if args.json:
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(data))
    return int(failed)


def _check_no_arguments(command: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise SpError if an --option has the name of an argument of the command, which would be passed twice."""
    for name in sorted(arguments.keys() & options.keys()):
        fix = f"Pass it as --{name.replace('_', '-')}."
        if name == "kwargs":
            fix = "Return the keyword arguments from the function: (model, args, kwargs)."
        cause = f"--option {name}: expected an option of the backend, got an argument of {command}."
        raise SpError("SP732", cause, _memory_fix(command, name) or fix)


def _memory_fix(command: str, name: str) -> str | None:
    """Return the fix for `memory` with the command explain, which always sets this argument; None for other names."""
    is_memory = command == "explain" and name.lstrip("-") == "memory"
    return "Omit it: explain always predicts the memory." if is_memory else None


def _check_writable(path: Path) -> None:
    """Raise SpError if the file cannot be written; called before the work of the command, which may take minutes."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise _cannot_write(path, error) from None
    if not existed:  # opening it has created it
        path.unlink()


def _cannot_write(path: Any, error: OSError) -> SpError:
    """Return the error for a file that cannot be written."""
    return SpError("SP733", f"{path}: the file cannot be written ({error.strerror}).")


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser, with a subparser for each command."""
    parser = argparse.ArgumentParser(
        prog="python -m sp_compile", description="Show the effect of sequence parallelism on a model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("explain", "show rewrites, collectives and memory of a rank"),
        ("verify", "compare results and gradients of simulated ranks with a single device"),
        ("plan", "list the configurations that fit in memory, with their predicted times"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("target", help="module:function that returns (model, args) or (model, args, kwargs)")
        command.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="a backend option; repeatable"
        )
        command.add_argument("--json", type=Path, help="also write the report to this JSON file")
        command.add_argument("--html", type=Path, help="also write the report to this HTML file")
        if name == "plan":
            command.add_argument("--memory", default="80GB", help="memory of a device, in bytes or with a unit")
            command.add_argument("--host-memory", help="host memory for each rank, if it is limited")
            command.add_argument(
                "--ranks", nargs="+", default=["8,16,64"], help="numbers of ranks to compare, such as 8 16 64"
            )
        else:
            command.add_argument("--sp", type=int, default=2, help="number of ranks that share the sequence")
        if name == "verify":
            command.add_argument("--tolerance", type=float, default=TOLERANCE, help="the largest relative error")
    text = "compare each attention strategy on processes of this machine with a single device: values, bytes, times"
    command = commands.add_parser("selftest", help=text, description=text)
    command.add_argument("--ranks", type=int, help="number of processes; by default the GPUs, or 2 on a CPU")
    command.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda, if there are two GPUs or more")
    command.add_argument("--compiler", help="the option `compiler`; by default inductor on GPUs, aot_eager on a CPU")
    command.add_argument("--json", type=Path, help="also write the results to this JSON file")
    text = "run a training script whose Trainers of transformers and TRL, and Accelerators, share sequences"
    command = commands.add_parser("run", help=text, description=text)
    command.add_argument("-m", "--module", action="store_true", help="the target is the name of a module")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a backend option; repeatable"
    )
    command.add_argument("target", help="the script")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _call_target(target: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Call the target of a command, module:function, and return its (model, args, kwargs).

    Raises:
        SpError: The function is missing or requires arguments (SP734), or returns something else (SP735).
    """
    module, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder
    expected = f"target: expected module:function, got {target!r}"
    try:
        if module.startswith("."):
            raise ImportError("the name of the module is relative")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpError("SP734", f"{expected}: {str(error).rstrip('.')}.") from None
    try:
        inspect.signature(function).bind()  # raises unless the function can be called without arguments
    except (TypeError, ValueError) as error:
        cause = f"target: expected a function without required arguments, got {target!r}: {error}."
        raise SpError("SP734", cause) from None
    result = function()
    match result:
        case (model, tuple() | list() as inputs):
            return model, inputs, {}
        case (model, tuple() | list() as inputs, dict() as kwargs):
            return model, inputs, kwargs
    items = ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else ""
    got = f"({items})" if items else type(result).__name__
    raise SpError("SP735", f"target: expected (model, args) or (model, args, kwargs) from {target!r}, got {got}.")


def _parse_ranks(texts: Sequence[str]) -> list[int]:
    """Parse the numbers of --ranks, separated by commas or spaces; raise SpError for other text."""
    numbers = [number for text in texts for number in text.split(",") if number]
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise SpError("SP711", f"--ranks: expected numbers of ranks such as 8 16 64, got {' '.join(texts)!r}.")
    return list(map(int, numbers))


def _parse_option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, where the value is a Python literal or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SpError("SP731", f"--option: expected NAME=VALUE such as attention=ring, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
