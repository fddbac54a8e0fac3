"""The doctor's look at the environment variables of launchers and backends: which launcher would Lightning see in them?

A pure function of the variables and of what was found out about this host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pgroup.doctor_report import Finding, Result

CHECK = "environment"

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LSF = ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE")
_INTERACTIVE = ("bash", "interactive")
_PREFIXES = ("TORCHELASTIC_", "SLURM_", "JSM_", "LSB_", "OMPI_", "PMI_", "PMIX_", "PALS_")
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_NAMES = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
_OUR_NAMES = ("LIGHTNING_PGROUP_INVITATION",)
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_INTERFACES = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "nccl"}
_BARRIER = "TORCH_DIST_INIT_BARRIER"

_LAUNCHER_OF_ITS_OWN = "Run the doctor by itself, not under a launcher: it starts its own ranks."


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the diagnosis has to know of this host.

    Attributes:
        interfaces: Names of the network interfaces.
        has_mpi4py: Whether ``mpi4py`` is installed.
        answers: Whether something listens at an address and port.
    """

    interfaces: Sequence[str]
    has_mpi4py: bool
    answers: Callable[[str, str], bool]


@dataclass(slots=True)
class _Diagnosis:
    """What comes together while the variables are looked at."""

    found: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    result: Result = Result.OK

    def warn(self, found: str, advice: str) -> None:
        self._add(found, advice)
        if self.result is Result.OK:
            self.result = Result.WARNING

    def fail(self, found: str, advice: str) -> None:
        self._add(found, advice)
        self.result = Result.FAILED

    def _add(self, found: str, advice: str) -> None:
        self.found.append(found)
        self.advice.append(advice)


def diagnose(environ: Mapping[str, str], host: Host) -> Finding:
    """Say which launcher Lightning would see, and what in the environment would break a run that is started from here.

    Args:
        environ: The environment.
        host: What was found out about this host; ``answers`` is asked only where the variables are torchrun's.
    """
    diagnosis = _Diagnosis()
    launcher = _launcher(environ, host)
    {
        "torchrun": _look_at_torchrun,
        "SLURM": _look_at_slurm,
        "LSF": _look_at_lsf,
        "MPI": _look_at_mpi,
        "by hand": _look_at_local_rank,
        "Lightning": _look_at_leftovers,
    }[launcher](environ, host, diagnosis)
    _look_at_backends(environ, host, diagnosis)
    if not diagnosis.found:
        diagnosis.found.append(_nothing(environ))
    return Finding(CHECK, diagnosis.result, "; ".join(diagnosis.found), tuple(diagnosis.advice))


def cleaned(environ: Mapping[str, str], interfaces: Sequence[str]) -> dict[str, str]:
    """The environment without what names a rank or a launcher, and without interfaces that are not there.

    The doctor's own ranks get it, so that a leftover is one finding and not the cause of all others.
    """
    names = (*_RANK_NAMES, *_TORCHRUN_NAMES, *_OUR_NAMES)
    kept = {name: value for name, value in environ.items() if name not in names and not name.startswith(_PREFIXES)}
    for name in _INTERFACES:
        if name in kept and _unknown_interface(name, kept[name], interfaces):
            del kept[name]
    return kept


def _launcher(environ: Mapping[str, str], host: Host) -> str:
    """Who starts the ranks in Lightning's eyes; in its own order."""
    if _TORCHRUN in environ:
        return "torchrun"
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        return "SLURM"
    if all(name in environ for name in _LSF):
        return "LSF"
    if _size_of_mpi(environ) > 1 and host.has_mpi4py:
        return "MPI"
    return "by hand" if "LOCAL_RANK" in environ else "Lightning"


def _look_at_torchrun(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if host.answers(address, port):
        diagnosis.warn(f"torchrun has started this process, and answers at {address}:{port}", _LAUNCHER_OF_ITS_OWN)
        return
    names = _named(environ, lambda name: name.startswith("TORCHELASTIC_") or name in (*_RANK_NAMES, *_TORCHRUN_NAMES))
    diagnosis.fail(
        f"variables of torchrun ({_TORCHRUN}={environ[_TORCHRUN]}), and no torchrun that answers at {address}:{port}",
        f"{_unset(names)}. An earlier run has left them, and Lightning would wait for ranks that nobody starts.",
    )


def _look_at_slurm(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    size = environ["SLURM_NTASKS"]
    if "SLURM_STEP_ID" in environ:
        diagnosis.warn(f"srun has started this process, as one of {size}", _LAUNCHER_OF_ITS_OWN)
    elif size == "1":
        diagnosis.found.append("a SLURM job of one task: Lightning would run one rank")
    else:
        diagnosis.fail(
            f"a SLURM job of {size} tasks (SLURM_NTASKS), in which srun has not started this process",
            f"Lightning would take it for rank 0 of {size} and wait for the others. Start the script with srun; or set"
            " SLURM_JOB_NAME=interactive, and Lightning starts the ranks itself.",
        )


def _look_at_lsf(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    size = environ["JSM_NAMESPACE_SIZE"]
    diagnosis.warn(f"jsrun (LSF) has started this process, as one of {size}", _LAUNCHER_OF_ITS_OWN)


def _look_at_mpi(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    diagnosis.warn(f"mpirun has started this process, as one of {_size_of_mpi(environ)}", _LAUNCHER_OF_ITS_OWN)


def _look_at_local_rank(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    names = _named(environ, lambda name: name in _RANK_NAMES)
    diagnosis.fail(
        f"{_shown(environ, names)}: this process would be a rank that was started by hand",
        f"{_unset(names)}. With LOCAL_RANK Lightning starts no ranks, and waits for those of somebody else.",
    )


def _look_at_leftovers(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    if _size_of_mpi(environ) > 1:
        diagnosis.warn(
            f"mpirun has started this process, as one of {_size_of_mpi(environ)}, and there is no mpi4py",
            "Without mpi4py Lightning does not see MPI, so that each process would be a run of its own: pip install mpi4py."
            f" {_LAUNCHER_OF_ITS_OWN}",
        )
    names = _named(environ, lambda name: name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "KUBERNETES_PORT" in environ and {"RANK", "WORLD_SIZE"} <= set(names):
        diagnosis.warn(
            f"{_shown(environ, names)}, in Kubernetes",
            "If Kubeflow has set them, give `KubeflowEnvironment()` to the Trainer, since Lightning does not find it by itself."
            f" {_unset(names)} otherwise.",
        )
    elif "RANK" in names or "WORLD_SIZE" in names:
        diagnosis.fail(
            f"{_shown(environ, names)}, and no launcher that has set this",
            f"{_unset(names)}. An earlier run has left this in the shell. What reads it waits for ranks that nobody starts:"
            " `process_group()`, `env://`, other frameworks.",
        )
    if environ.get("NODE_RANK", "0") != "0" and "MASTER_ADDR" not in environ:
        diagnosis.fail(
            f"NODE_RANK={environ['NODE_RANK']}, and no MASTER_ADDR",
            "For a run of several nodes set MASTER_ADDR and MASTER_PORT, the same on each; for one node: unset NODE_RANK.",
        )


def _look_at_backends(environ: Mapping[str, str], host: Host, diagnosis: _Diagnosis) -> None:
    for name, backend in _INTERFACES.items():
        unknown = _unknown_interface(name, environ.get(name, ""), host.interfaces)
        if unknown:
            diagnosis.fail(
                f"{name}={environ[name]}, and this host has no interface {unknown}",
                f"{backend} would not find it. It has {', '.join(host.interfaces)}: set {name} to one of these, or unset it.",
            )
    if environ.get(_BARRIER) == "1":
        diagnosis.warn(
            f"{_BARRIER}=1",
            f"Each creation of a group then ends with one more wait for all ranks, which gains nothing here: unset {_BARRIER}.",
        )


def _unknown_interface(variable: str, value: str, interfaces: Sequence[str]) -> str:
    """The first name in a list of interfaces that this host does not have. NCCL's are prefixes, ``=`` exact, ``^`` excluded."""
    is_prefix = variable.startswith("NCCL") and not value.startswith("=")
    if value.startswith("^"):
        return ""
    for name in filter(None, value.removeprefix("=").split(",")):
        if not any(one.startswith(name) if is_prefix else one == name for one in interfaces):
            return name
    return ""


def _size_of_mpi(environ: Mapping[str, str]) -> int:
    return max(int(text) if (text := environ.get(name, "")).isdecimal() else 0 for name in _SIZES_OF_MPI)


def _nothing(environ: Mapping[str, str]) -> str:
    where = _named(environ, lambda name: name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    shown = f", with {_shown(environ, where)}" if where else ""
    return f"no launcher: Lightning starts the ranks itself{shown}"


def _named(environ: Mapping[str, str], choose: Callable[[str], bool]) -> list[str]:
    return sorted(name for name in environ if choose(name))


def _shown(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names)


def _unset(names: Sequence[str]) -> str:
    return f"Unset what is left over: unset {' '.join(names)}"
