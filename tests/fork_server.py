"""Starts Python programs for tests by forking a process that has PyTorch imported: 20 ms instead of 2 to 4 s.

pytest starts the server (`server()`) and talks to it over a socket pair. A request carries the program's arguments,
environment, working directory, output descriptors and a socket of its own, the lifeline. The program lives as long as
pytest holds the other end: when pytest closes it or dies, even by SIGKILL, the server kills the program's session. The
server reaps the program only then, so its pid stays valid as long as pytest uses it.

A forked program sees what `python program.py` sees: `__main__`, `sys.argv`, `sys.path`, environment, directory. It ends
as the interpreter does: threads, atexit handlers, modules, exit code. The differences:

- MODULES are imported already. `tessera` is not, so libtessera reads the program's own environment.
- All programs share the server's hash seed and address layout.
- PYTHON*, LD_* and TORCH_* must be those of the server, which has read them. It refuses a request where they differ.
- Static destructors of PyTorch's libraries do not run.

`Start.EXECUTE` starts a new interpreter instead; it has the same lifeline.

Invariant: the server has one thread and has made no tensor. It checks /proc/self/task before each fork.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import dataclasses
import enum
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from patience import patience

# Every process of a session has this in its environment. The server finds leftovers by it.
SESSION = "TESTS_OF_SESSION"

# Otherwise OpenMP and OpenBLAS start threads on import.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# Read from the environment when a process starts.
READ_AT_START = ("PYTHON", "LD_", "TORCH_")
HEEDED_LATER = {"PYTHONFAULTHANDLER"}

# What test programs import.
MODULES = [
    "ml_dtypes",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.algorithms.join",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
    "torch.testing",
    "torch.utils.checkpoint",
]

# How long processes that pytest does not wait for, such as helpers of a job, may take to end.
PATIENCE_S = patience(10)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Start(enum.Enum):
    FORK = "fork"  # the server
    EXECUTE = "execute"  # a new interpreter


# ---------------------------------------------------------------- in pytest


class Program:
    """A running program, like a `subprocess.Popen`. Its output goes into memory."""

    def __init__(self, arguments: Sequence[str], life: socket.socket, outputs: Sequence[int]) -> None:
        self.arguments = arguments
        self.pid = 0
        self.returncode: int | None = None
        self._life, self._outputs = life, outputs

    def wait(self, timeout: float) -> int:
        """Return the exit code, or minus the signal."""
        if self.returncode is None:
            self.returncode = int(self.answer(timeout)["returncode"])
        return self.returncode

    def answer(self, timeout: float) -> dict[str, Any]:
        self._life.settimeout(max(timeout, 0.001))
        try:
            told = self._life.recv(1 << 16)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self.arguments, timeout) from error
        if not told:
            raise RuntimeError("the fork server has died; see its standard error")
        answer: dict[str, Any] = json.loads(told)
        if "refused" in answer:
            raise RuntimeError(f"the fork server: {answer['refused']}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def printed(self, stream: int = 0) -> str:
        descriptor = self._outputs[stream]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Kill what is left of its session, and wait for that."""
        with self._life:
            self._life.shutdown(socket.SHUT_WR)
            self._life.settimeout(60)
            while self._life.recv(1 << 16):
                pass
        for descriptor in self._outputs:
            os.close(descriptor)


class Server:
    """pytest's end."""

    def __init__(self) -> None:
        self.session = os.environ[SESSION] = uuid.uuid4().hex
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def import_torch(self) -> None:
        """Start the import without waiting for it."""
        self._control.send(json.dumps({"import": True}).encode())

    def start(
        self,
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        how: Start = Start.FORK,
        streams: int = 1,
    ) -> Program:
        """Start a script, `-c` and a text, or `-m` and a module, with arguments. With two streams, standard error goes
        into the second."""
        words = [str(word) for word in arguments]
        request = {"how": how.value, "arguments": words, "cwd": str(cwd or Path.cwd())}
        request |= {"environment": {**environment, **ONE_THREAD, SESSION: self.session}}
        life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Program(words, life, [output_file() for _ in range(streams)])
        try:
            with theirs:
                descriptors = [theirs.fileno(), program._outputs[0], program._outputs[-1]]
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            program.pid = int(program.answer(timeout=patience(120))["pid"])
        except BaseException:
            program.close()
            raise
        return program

    def close(self) -> None:
        """Kill what is left of the session; fail if something was left."""
        if self._control.fileno() < 0:
            return
        with self._control, suppress(BrokenPipeError):
            self._control.send(json.dumps({"end": PATIENCE_S}).encode())
        if self._process.wait(timeout=patience(60)) != 0:
            raise RuntimeError("tests left processes behind; the fork server has named and killed them")


def output_file() -> int:
    """Make a file in memory for the output of several processes. They share its offset, which the kernel does not lock
    as it does on disk: without O_APPEND they overwrite each other's output."""
    output = os.memfd_create("output")
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output


@functools.cache
def server() -> Server:
    """The session's server."""
    made = Server()
    atexit.register(made.close)
    return made


# ---------------------------------------------------------------- in the server


class Refused(Exception):
    """A request that the server cannot serve."""


@dataclasses.dataclass(eq=False)
class Child:
    pid: int
    end: int  # a pidfd: readable once the child has ended
    life: socket.socket


class Serving:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.environment = dict(os.environ)
        self.children: set[Child] = set()
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)

    def until_forked(self) -> dict[str, Any]:
        """Serve requests. Return in forked children only, with the request."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.control:
                    request = self.take_request()
                    if request is not None:
                        return request
                elif key.data not in self.children:  # ended by an earlier event of this batch
                    pass
                elif key.fileobj is key.data.life:
                    self.end(key.data)
                else:
                    self.tell_end(key.data)

    def take_request(self) -> dict[str, Any] | None:
        data, descriptors, _, _ = socket.recv_fds(self.control, 1 << 20, 3)
        request: dict[str, Any] = json.loads(data) if data else {"end": 0}
        if "end" in request:
            self.end_session(patience_s=request["end"])
        if "import" in request:
            import_all()
            return None
        life, outputs = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            pid = self.fork(request)
        except Refused as reason:
            tell(life, refused=str(reason))
            life.close()
        else:
            if pid == 0:
                self.become_child(life, outputs)
                return request
            child = Child(pid, os.pidfd_open(pid), life)
            self.children.add(child)
            self.selector.register(child.life, selectors.EVENT_READ, child)
            self.selector.register(child.end, selectors.EVENT_READ, child)
            tell(life, pid=pid)
        for descriptor in outputs:
            os.close(descriptor)
        return None

    def fork(self, request: dict[str, Any]) -> int:
        if request["how"] == Start.FORK.value:
            import_all()
            theirs = request["environment"]
            differ = [
                name
                for name in sorted({*theirs, *self.environment} - HEEDED_LATER)
                if name.startswith(READ_AT_START) and theirs.get(name) != self.environment.get(name)
            ]
            if differ:
                raise Refused(f"{', '.join(differ)}: differs from the server's; use Start.EXECUTE")
        threads = os.listdir("/proc/self/task")
        if len(threads) != 1:
            raise Refused(f"cannot fork with {len(threads)} threads")
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
        return pid

    def become_child(self, life: socket.socket, outputs: list[int]) -> None:
        """Close everything of the server's."""
        self.selector.close()
        for child in self.children:
            child.life.close()
            os.close(child.end)
        self.control.close()
        life.close()
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        for descriptor in outputs:
            os.close(descriptor)

    def tell_end(self, child: Child) -> None:
        self.selector.unregister(child.end)
        ended = os.waitid(os.P_PIDFD, child.end, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        tell(child.life, returncode=ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def end(self, child: Child) -> None:
        """Kill and reap its session."""
        self.children.remove(child)
        for registered in (child.life, child.end):
            with suppress(KeyError):
                self.selector.unregister(registered)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, child.end, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # orphans of the session come to the server, a subreaper
            while True:
                os.waitid(os.P_PGID, child.pid, os.WEXITED)
        with suppress(ChildProcessError):  # it died before setsid()
            os.waitpid(child.pid, 0)
        child.life.close()
        os.close(child.end)

    def end_session(self, patience_s: float) -> NoReturn:
        """Kill every process of the session. With patience, wait for them first, and name those that stay."""
        for child in list(self.children):
            self.end(child)
        deadline = time.monotonic() + patience_s
        while (left := list(processes_of(self.environment[SESSION]))) and time.monotonic() < deadline:
            ends_within(left[0][0], deadline - time.monotonic())
            reap()
        for pid, command in left:
            if patience_s:
                print(f"fork server: left behind: {pid} {command}", file=sys.stderr, flush=True)
        while remaining := list(processes_of(self.environment[SESSION])):
            for pid, _ in remaining:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ends_within(pid, 1)
            reap()
        os._exit(1 if left and patience_s else 0)


def tell(life: socket.socket, **answer: object) -> None:
    with suppress(OSError):  # pytest has closed its end
        life.send(json.dumps(answer).encode())


def ends_within(pid: int, timeout: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(timeout, 0))[0])
    finally:
        os.close(descriptor)


def reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def processes_of(session: str) -> Iterator[tuple[int, str]]:
    """All but this one. Zombies have no environment."""
    mark = f"{SESSION}={session}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with suppress(OSError):  # ended, or another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield (
                        int(entry.name),
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
                    )


@functools.cache
def import_all() -> None:
    sys.modules["triton"] = None  # type: ignore[assignment]  # large, and for GPUs: dynamo does without it
    for name in MODULES:
        importlib.import_module(name)
    del sys.modules["triton"]
    gc.collect()
    gc.freeze()  # else each child's collector writes to, and so copies, all pages


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# ---------------------------------------------------------------- in a child


def become(request: Mapping[str, Any]) -> None:
    """Run the program as the interpreter does."""
    program, *arguments = request["arguments"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["how"] == Start.EXECUTE.value:
        os.execv(sys.executable, [sys.executable, program, *arguments])
    forget_the_server()
    skip_destructors_of_the_server()
    sys.argv = [program, *arguments]
    if program == "-m":
        sys.path.insert(0, os.getcwd())
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if program == "-c":
        sys.path.insert(0, "")
        text, name = sys.argv.pop(1), "<string>"
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        text, name = Path(program).read_bytes(), program
        main.__file__ = program
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


def forget_the_server() -> None:
    """Renew what modules keep from import time."""
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def skip_destructors_of_the_server() -> None:
    """PyTorch's take 0.2 s, most of it to copy pages. exit() calls handlers in reverse order: those of libraries which
    the program has loaded, then these, and no more."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


if __name__ == "__main__":
    del sys.path[0]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    become(Serving(socket.socket(fileno=int(sys.argv[1]))).until_forked())
