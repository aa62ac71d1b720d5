"""Run the package on other versions of torch and Python: its import, a small demo, and a sample of the tests.

    python benchmarks/versions.py                                  all of VERSIONS
    python benchmarks/versions.py 2.11.0/3.11 --tests tests/scan   one of them, torch/Python, and a folder of tests

uv creates an environment for each version in --environments. It takes up to 6 GB, since torch includes CUDA libraries;
UV_TORCH_BACKEND=cpu selects the smaller builds of torch's own index. The outcomes of the newest run of each version are
stored there, too, and --output is written from all of them. The sample has --of-each-folder tests from every folder of
tests, from all its files, without the slow ones.
"""

import argparse
import json
import os
import platform
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from measuring.tables import commit, markdown, processor
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.11.0/3.11", "2.12.1/3.12", "2.13.0/3.11", "2.14.1/3.13", "2.15.0/3.13")
IMPORT = "import sp_compile, torch; print(torch.__version__)"
DEMO = "examples/train_lm.py --seq 512 --steps 2 --dim 32 --layers 1 --chart".split()

# Otherwise Inductor probes vector instructions in every process, and imports torch again for each kind.
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}

Found = dict[str, Any]
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="torch/Python")
    parser.add_argument("--of-each-folder", type=int, default=5, help="number of tests of each folder")
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="files and folders; only results of all are stored"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument("--uv", default="uv", help="the command that makes environments")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache/sp_compile/versions")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/checks/versions.md")
    given = parser.parse_args()
    for version in given.versions:
        torch, python = version.split("/")
        console.rule(f"torch {torch}, Python {python}")
        folder = given.environments / f"torch-{torch}-python-{python}"
        make(folder, torch, python, given.uv)
        found = tried(folder, given.tests, given.of_each_folder, given.workers)
        console.print(summary([found]))
        console.print(*found["failures"], sep="\n", markup=False)
        if given.tests == ["tests"]:
            (folder / "found.json").write_text(json.dumps(found, indent=1))
    kept = [json.loads(file.read_text()) for file in sorted(given.environments.glob("*/found.json"))]
    console.print(summary(kept))
    given.output.write_text(report(kept))


def make(folder: Path, torch: str, python: str, uv: str) -> None:
    """Return an environment with this torch and the dependencies of the tests; create it if it does not exist."""
    if not folder.exists():
        execute([uv, "venv", "-q", "--python", interpreter(python), str(folder)]).check_returncode()
    install = [uv, "pip", "install", "-q", "--python", str(folder / "bin/python"), f"torch=={torch}"]
    execute([*install, "-e", ".[test,examples]"]).check_returncode()


def interpreter(python: str) -> str:
    """Return the path of pyenv's newest Python of a version, or the version for uv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = max(versions.glob(f"{python}.*"), key=lambda folder: int(folder.name.split(".")[2]), default=None)
    return python if found is None else str(found / "bin/python")


def tried(folder: Path, tests: list[str], count: int, workers: int) -> Found:
    """Run the import, the demo and the tests in an environment; return their outcomes."""
    python, results = str(folder / "bin/python"), folder / "tests.xml"
    start = time.monotonic()
    imported = execute([python, "-c", IMPORT], capture_output=True)
    demo = execute([python, *DEMO, str(folder / "demo.png")], capture_output=True)
    sample = ["-p", "measuring.sampling", "--of-each-folder", str(count), "-m", "not slow", f"--junitxml={results}"]
    results.unlink(missing_ok=True)
    execute([python, "-m", "pytest", "-q", "-n", str(workers), *sample, *tests])
    version = execute([python, "-V"], capture_output=True).stdout.split()[-1]
    return {
        "torch": imported.stdout.strip() or folder.name.split("-")[1],
        "python": version,
        "import": outcome(imported),
        "demo": outcome(demo),
        **counted(results),
        "minutes": (time.monotonic() - start) / 60,
        "day": str(date.today()),
        "commit": commit(),
    }


def execute(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT / "benchmarks")}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """Return "ok", or the last line that a failed command printed."""
    return "ok" if done.returncode == 0 else ((done.stdout + done.stderr).strip().splitlines() or ["died"])[-1]


def counted(results: Path) -> Found:
    """Tests by folder and outcome, names of those that failed, and reasons why others were skipped."""
    tests = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    found: Found = {"passed": 0, "failed": 0, "skipped": 0, "folders": Counter(), "failures": [], "reasons": Counter()}
    for test in tests:
        place = test.get("classname", "")
        ends = {child.tag: child.get("message", "").strip().partition("\n")[0] for child in test}
        skipped = ends.get("skipped")
        failed = ends.get("failure", ends.get("error"))
        found["folders"][place.split(".")[1] if "." in place else place] += 1
        found["failed" if failed is not None else "skipped" if skipped is not None else "passed"] += 1
        if failed is not None:
            found["failures"].append(f"{place}.{test.get('name')}: {failed}")
        elif skipped is not None:
            found["reasons"][skipped] += 1
    return found


def summary(kept: list[Found]) -> Table:
    table = Table("torch", "Python", "import", "demo", "passed", "skipped", "failed", "minutes", "run on", "commit")
    for one in kept:
        counts = [str(one[k]) for k in ("passed", "skipped", "failed")]
        when = [f"{one['minutes']:.0f}", one["day"], one["commit"]]
        table.add_row(one["torch"], one["python"], one["import"], one["demo"], *counts, *when)
    return table


def report(kept: list[Found]) -> str:
    folders = sorted({folder for one in kept for folder in one["folders"]})
    tests = Table("torch", *folders)
    for one in kept:
        tests.add_row(one["torch"], *(str(one["folders"].get(folder, 0)) for folder in folders))
    lines = [
        "# Versions of torch and Python",
        "",
        f"- {processor()}, {platform.system()}; CPU and Gloo",
        "- `make test-versions`",
        f"- import: of the package; demo: `{' '.join(DEMO[:-1])}`, one device against 2 ranks",
        "- tests: some tests of every folder, from all its files, without the slow ones",
        "- Inductor generates code without vector instructions, as its test of each set takes longer than the rest",
        "- minutes: on a machine with other programs",
        "",
        markdown(summary(kept)),
        "",
        "Tests by folder:",
        "",
        markdown(tests),
    ]
    for one in kept:
        reasons = [f"{reason} ({count})" for reason, count in sorted(one["reasons"].items())]
        for title, found in (("skipped", reasons), ("failed", one["failures"])):
            if found:
                lines += ["", f"{title} on torch {one['torch']}:", "", *(f"- {text}" for text in found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
