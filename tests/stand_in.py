"""What a warm script has for its Python: hands all that it was started with to a zygote, and then ends as the script does.

This is small since it is what each start costs: no site, and nothing imported that is not in the interpreter itself. The
zygotes' folder has a copy of it, beside their sockets. See `zygote.py` for the other end.
"""

import _signal
import _socket
import marshal
import posix
import sys

FOLDER = sys.argv[0].rpartition("/")[0]
REAL = sys.executable
FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main():
    what = parse(sys.argv[1:])
    if what is None:  # an option that only a real interpreter can have
        posix.execve(REAL, [REAL, *sys.argv[1:]], posix.environ)
    numbers = [getattr(_signal, name) for name in FORWARDED]
    ignored = [number for number in numbers if _signal.getsignal(number) == _signal.SIG_IGN]
    descriptors = [int(name) for name in posix.listdir("/proc/self/fd")]
    descriptors = [number for number in descriptors if is_inherited(number)]
    job = {
        **what,
        "executable": sys.argv[0],
        "cwd": posix.getcwd(),
        "environ": dict(posix.environ),
        "descriptors": descriptors,
        "ignored": ignored,
        "network": posix.readlink("/proc/self/ns/net"),
        "pid": posix.getpid(),
    }
    # Ranks of one job come from different zygotes, so that they have different hashes of strings, as processes have.
    zygote = int(posix.environ.get(b"LOCAL_RANK", b"0")) % 2
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(f"{FOLDER}/{zygote}")
    text = marshal.dumps(job)
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    line.sendmsg([len(text).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    line.sendall(text)
    for number in set(numbers) - set(ignored):
        _signal.signal(number, lambda number, frame: line.sendall(bytes([number])))
    for number in descriptors:  # so that whoever reads from the script sees the end of what it writes
        posix.close(number)
    end_as(int.from_bytes(receive(line, 4), "big"))


def parse(arguments):
    while arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if not arguments or arguments == ["-"]:
        return None
    if arguments[0] in ("-c", "-m"):
        return {"kind": arguments[0], "what": arguments[1], "argv": arguments[2:]}
    return None if arguments[0].startswith("-") else {"kind": "", "what": arguments[0], "argv": arguments[1:]}


def is_inherited(number):
    try:
        return posix.get_inheritable(number)
    except OSError:  # the folder that was listed
        return False


def receive(line, size):
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            posix.kill(posix.getpid(), _signal.SIGKILL)  # with the zygote the script has died too
        found += part
    return found


def end_as(status):
    if posix.WIFSIGNALED(status):
        number = posix.WTERMSIG(status)
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    posix._exit(posix.WEXITSTATUS(status))


main()
