"""The zygotes of a test session, and the stand-in for Python that starts scripts from them."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.zygote import MARK

COLD = "LIGHTNING_PGROUP_TESTS_COLD"
"""Set to 1, all scripts start cold."""

ZYGOTES = 2
_VARIABLE = "LIGHTNING_PGROUP_TESTS_PYTHON"  # the workers of xdist share those of the process that has started them


def python() -> str:
    """What to run a script with instead of ``sys.executable``."""
    return os.environ.get(_VARIABLE, sys.executable)


def wake() -> None:
    """Let the zygotes get warm, and do not wait for it."""
    for number in range(ZYGOTES if _VARIABLE in os.environ else 0):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(Path(os.environ[_VARIABLE]).parent / str(number)))


class Zygotes:
    """Lives as long as a test session. A zygote imports nothing until its first script comes, or :func:`wake`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        here = Path(__file__).parent
        stand_in = self.folder / "python"
        stand_in.write_text(f"#!{sys.executable} -IS\n{(here / 'stand_in.py').read_text()}")
        stand_in.chmod(0o700)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: "0" * 32}
        self.processes = []
        for number in range(ZYGOTES):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self.folder / str(number)))
                listener.listen(128)
                command = [sys.executable, str(here / "zygote.py"), str(listener.fileno())]
                one = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environ, start_new_session=True
                )
            self.processes.append(one)
        os.environ[_VARIABLE] = str(stand_in)

    def close(self) -> None:
        """End the zygotes and what they have started."""
        del os.environ[_VARIABLE]
        for one in self.processes:
            one.stdin.close()
            one.wait(60)  # it may just be getting warm
        shutil.rmtree(self.folder)
