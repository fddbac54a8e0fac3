"""What this package adds to the time that a script needs to import Lightning.

Measures, in fresh processes, ``import lightning.pytorch``, then ``import lightning_pgroup``, then the first use of the
strategy, ``from lightning_pgroup import PGroupDDPStrategy``, which imports all that a Trainer needs of it. Prints the
medians, and the ratios to the time of Lightning::

    python benchmarks/imports.py --runs 11
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys

STEPS = ("import lightning.pytorch", "import lightning_pgroup", "from lightning_pgroup import PGroupDDPStrategy")

SCRIPT = """
import time
for step in {steps!r}:
    start = time.perf_counter()
    exec(step)
    print(time.perf_counter() - start)
"""

VERSIONS = """
import lightning, torch, lightning_pgroup
print(f"lightning-pgroup {lightning_pgroup.__version__}, torch {torch.__version__}, lightning {lightning.__version__}")
"""


def run(code: str) -> list[str]:
    """The lines that ``code`` prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    [versions] = run(VERSIONS)  # and compiles what is not compiled yet
    run(SCRIPT.format(steps=STEPS))
    lightning, package, strategy = zip(
        *([float(line) for line in run(SCRIPT.format(steps=STEPS))] for _ in range(arguments.runs)), strict=True
    )
    both = [one + other for one, other in zip(package, strategy, strict=True)]
    print(
        f"{versions}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, {arguments.runs} runs"
    )
    print(f"{'':52}{'median ms':>10}{'ratio':>9}")
    rows = {STEPS[0]: lightning, STEPS[1]: package, "the same and the first use of the strategy": both}
    for name, times in rows.items():
        ratio = statistics.median(own / whole for own, whole in zip(times, lightning, strict=True))
        print(f"{name:52}{1e3 * statistics.median(times):10.1f}{ratio:9.2%}")


if __name__ == "__main__":
    sys.exit(main())
