"""Which TCP addresses processes of this host listen on, read from Linux's ``/proc``. Elsewhere nothing is known."""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def listening(process: int | None = None) -> list[tuple[str, int]] | None:
    """The addresses and ports on which a process listens, sorted; ``None`` where that can not be told. Never waits.

    Args:
        process: Its id; by default this process.
    """
    if not sys.platform.startswith("linux") or not (_PROC / "self" / "net" / "tcp").exists():
        return None
    its = set(_inodes(_PROC / ("self" if process is None else str(process))))
    return sorted({(address, port) for address, port, inode in _listeners() if inode in its})


def owner_of_port(port: int) -> str:
    """Who listens on a port, as ``"python (pid 4711)"``; empty where that can not be told. Never waits."""
    if not sys.platform.startswith("linux"):
        return ""
    wanted = {inode for _, one, inode in _listeners() if one == port}
    for folder in sorted(_PROC.glob("[0-9]*")) if wanted else ():
        if wanted & set(_inodes(folder)):
            with contextlib.suppress(OSError):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return ""


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an address."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _inodes(process: Path) -> Iterator[str]:
    """The sockets that a process has open. None, if it is another user's or has ended."""
    with contextlib.suppress(OSError):
        for name in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(os.readlink(process / "fd" / name))
                if match:
                    yield match.group(1)


def _listeners() -> Iterator[tuple[str, int, str]]:
    """Address, port and inode of each listening socket in this network namespace."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "self" / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield _decoded(address), int(port, 16), fields[9]


def _decoded(text: str) -> str:
    """The address that the kernel shows as words of four bytes, each in the byte order of this host."""
    raw = bytes.fromhex(text)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)))
