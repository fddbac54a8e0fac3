"""The job of a Hydra sweep in which this process is, and the command that runs one more rank of this job, and of no other.

Hydra is not imported here: whoever is in a job of it has done so.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def current_job() -> str | None:
    """A name for the job of a sweep that runs in this process now, which no other job has; ``None`` outside of a sweep.

    Local, called by the launchers and before collectives. A single run is no sweep: its ranks run the same command line.
    """
    config = _config()
    if config is None or getattr(config.mode, "name", "") != "MULTIRUN" or "num" not in config.job:
        return None
    return f"{config.runtime.output_dir}#{config.job.num}"


def rank_command(local_rank: int) -> tuple[Sequence[str], str]:
    """How to start another rank of the job that runs now: the script, as one single run with the overrides of this job.

    The whole command line would run the sweep once more in each rank: with a sweeper that draws its own values, with a launcher
    that starts its own workers, and out of step after a job that has failed on one rank only.

    Args:
        local_rank: Which rank; its log gets a name of its own, in the folder of the job.

    Returns:
        The command, and the folder to start it in.
    """
    config = _config()
    assert config is not None
    job, folder, start = config.job, str(config.runtime.output_dir), str(config.runtime.cwd)
    command = [sys.executable, *_script(start)]
    for source in config.runtime.config_sources:
        if source.provider == "main" and source.schema in ("file", "pkg"):
            command += ["--config-path", source.path if source.schema == "file" else f"pkg://{source.path}"]
        elif source.provider == "command-line":
            command += ["--config-dir", source.path]
    if job.config_name is not None:
        command += ["--config-name", job.config_name]
    same = {
        "hydra.run.dir": folder,
        "hydra.sweep.dir": config.sweep.dir,
        "hydra.sweep.subdir": config.sweep.subdir,
        "hydra.job.name": job.name,
        "hydra.job.id": job.id,
    }
    command += [*config.overrides.hydra, *config.overrides.task]
    command += [f"{key}={_quoted(str(value))}" for key, value in same.items()]
    for name, path in _log_files(config):
        log = path.with_stem(f"{path.stem}_rank_{local_rank}")
        command.append(f"hydra.job_logging.handlers.{name}.filename={_quoted(str(log))}")
    return [*command, f"hydra.job.num={job.num}", "hydra.output_subdir=null", "hydra.mode=RUN"], start


def _config() -> Any:
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None


def _script(start: str) -> list[str]:
    """The arguments for Python that run the user's script, in a worker process of joblib too."""
    path = os.path.abspath(os.path.join(start, sys.argv[0]))
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.origin == path:
        return ["-m", spec.name]
    # The folder of a script that is a symbolic link is not in the search path, but that of the file it points to.
    if os.path.abspath(getattr(main, "__file__", None) or "") == path or os.path.dirname(path) in sys.path:
        return [path]
    # A worker has the command line of the process that has started it, and its search path: `python -m` leaves out the folder
    # of the script, and `sys.argv` does not tell.
    roots = [root for root in map(os.path.abspath, sys.path) if path.startswith(f"{root}{os.sep}")]
    if not roots:
        return [path]
    return ["-m", ".".join(Path(path).relative_to(max(roots, key=len)).with_suffix("").parts)]


def _log_files(config: Any) -> list[tuple[str, Path]]:
    handlers = (config.job_logging or {}).get("handlers") or {}
    return [(name, Path(one["filename"])) for name, one in handlers.items() if isinstance(one, Mapping) and "filename" in one]


def _quoted(text: str) -> str:
    """A text as Hydra reads it from a command line, whatever is in it."""
    # A backslash stands for itself, but before a quotation mark it is written twice.
    text = re.sub(r"(\\*)'", r"\1\1\\'", text.replace("${", "\\${"))
    return "'" + re.sub(r"\\+$", lambda end: end[0] * 2, text) + "'"
