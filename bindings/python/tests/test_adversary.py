"""A user who does everything wrong: each mistake is refused in words of Python, and none ends the interpreter."""

import copy
import gc
import pickle
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera as ts

INT = (TypeError, ts.InvalidArgument)


class Things:
    """One of each object, of a job of one rank."""

    def __init__(self, root: Any) -> None:
        self.comm = ts.init()
        self.w = np.ones(3, np.float32)
        self.ddp = ts.DDP(self.comm, {"w": self.w, "b": np.ones(2)})
        self.opt = ts.SGD(self.ddp)
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
        self.engine = ts.Engine(self.comm, {"u": {"w": np.ones(3)}}, config)
        self.scale = ts.engine.LossScale()
        self.data = ts.Sampler(self.comm, 10)
        self.state = ts.State(step=1)
        self.saver = ts.Saver(self.comm, root / "checkpoints")
        self.layout = ts.Layout((4,), [2], [ts.Shard(0)])
        self.mesh = ts.Mesh(self.comm, {"dp": 1})
        self.server = ts.StoreServer(insecure=True)
        self.store = ts.Store(self.server.uri, insecure=True, timeout=5)
        self.work = self.comm.barrier(async_op=True)
        self.work.wait()
        self.saver.save(1, self.state)
        self.checkpoint = ts.Checkpoint(root / "checkpoints")

    def all(self) -> list[Any]:
        return [thing for name, thing in vars(self).items() if name != "w"]

    def close(self) -> None:
        for thing in reversed(self.all()):
            if hasattr(thing, "close"):
                thing.close()


@pytest.fixture
def things(tmp_path):
    made = Things(tmp_path)
    yield made
    made.close()


def read_only() -> np.ndarray:
    array = np.ones(3)
    array.flags.writeable = False
    return array


# Each: the call, what it raises, and what the message has to say.
MISTAKES: dict[str, tuple[Callable[[Things], Any], Any, str]] = {
    # swapped and forgotten arguments
    "ddp swapped": (lambda t: ts.DDP({"w": t.w}, t.comm), TypeError, "comm is a dict.*swapped"),
    "sampler swapped": (lambda t: ts.Sampler(10, t.comm), TypeError, "comm is a int.*swapped"),
    "saver swapped": (lambda t: ts.Saver("root", t.comm), TypeError, "comm is a str.*swapped"),
    "mesh swapped": (lambda t: ts.Mesh({"dp": 1}, t.comm), TypeError, "comm is a dict.*swapped"),
    "save swapped": (lambda t: t.saver.save(t.state, 1), TypeError, "state is a int.*swapped"),
    "save a dict": (lambda t: t.saver.save(1, {"a": 1}), TypeError, "state is a dict; it must be a tessera.State"),
    "store for comm": (lambda t: ts.Comm.create(t.comm, 0, 1), TypeError, r"store is a Comm; it must be a tessera\.S"),
    "lr by place": (lambda t: ts.AdamW(t.ddp, 1e-3), TypeError, r"grads is 0\.001.*lr=0\.001"),
    "mesh of a list": (lambda t: ts.Mesh(t.comm, ["dp"]), TypeError, "sizes is a list"),
    # parameters
    "a bare array": (lambda t: ts.DDP(t.comm, t.w), TypeError, "params is a ndarray; it must be a dict"),
    "no parameters": (lambda t: ts.DDP(t.comm, None), TypeError, "params is a NoneType; it must be a dict"),
    "int names": (lambda t: ts.DDP(t.comm, {1: t.w}), TypeError, "the key 1; parameter names must be str"),
    "surrogate": (lambda t: ts.DDP(t.comm, {"\ud800": t.w}), ts.InvalidArgument, "surrogate"),
    "zero in a name": (lambda t: ts.DDP(t.comm, {"a\0b": t.w}), ts.InvalidArgument, "zero character"),
    "a float": (lambda t: ts.DDP(t.comm, {"scale": 1.0}), TypeError, "parameter 'scale': a float is not a tensor"),
    "columns": (lambda t: ts.DDP(t.comm, {"w": np.ones((4, 4))[:, ::2]}), ts.InvalidArgument, '"w".*contiguous copy'),
    # arrays
    "list": (lambda t: t.comm.all_reduce([1.0, 2.0]), TypeError, r"a list of numbers is not a tensor; .*np\.array"),
    "int16": (lambda t: t.comm.all_reduce(np.ones(2, np.int16)), ts.Unsupported, "i16 cannot.*f16, bf16, f32.*i64"),
    "complex": (lambda t: t.comm.all_reduce(np.ones(2, complex)), ts.Unsupported, "c128 cannot.*f16, bf16, f32"),
    "big endian": (lambda t: t.comm.all_reduce(np.ones(2, ">f4")), ts.InvalidArgument, ">f4.*byte order"),
    "big endian by name": (
        lambda t: t.comm.all_reduce(np.ones(2, ">f4"), dtype="float32"),
        ts.InvalidArgument,
        ">f4.*byte order",
    ),
    "dtype of other order": (lambda t: t.comm.empty(3, ">f4"), ts.InvalidArgument, ">f4"),
    "objects": (lambda t: t.comm.all_reduce(np.array([None])), ts.InvalidArgument, "dtype object"),
    "dates": (lambda t: t.comm.all_reduce(np.zeros(2, "M8[s]")), ts.InvalidArgument, "datetime64"),
    "columns of a field": (
        lambda t: t.comm.all_reduce(np.zeros(3, [("a", "f4"), ("b", "i1")])["a"]),
        ts.InvalidArgument,
        r"np\.ascontiguousarray",
    ),
    "reversed": (lambda t: t.comm.all_reduce(np.ones(4)[::-1]), ts.InvalidArgument, r"np\.ascontiguousarray"),
    "scalar": (lambda t: t.comm.all_reduce(np.float64(1)), ts.InvalidArgument, r"NumPy scalar.*np\.array\(x\)"),
    "read-only": (lambda t: t.comm.all_reduce(read_only()), ts.InvalidArgument, "read-only"),
    "unknown dtype": (lambda t: t.comm.all_reduce(t.w, dtype="floaty"), ts.InvalidArgument, "'floaty'.*float32"),
    "dtype by number": (lambda t: t.comm.empty(3, 99), ts.InvalidArgument, "dtype 99.*float32"),
    # numbers
    "root by name": (lambda t: t.comm.broadcast(t.w, "0"), TypeError, "root is '0'; expected an integer"),
    "half a root": (lambda t: t.comm.broadcast(t.w, 0.5), TypeError, "root is 0.5; expected an integer"),
    "negative root": (lambda t: t.comm.broadcast(t.w, -1), ts.InvalidArgument, "root -1"),
    "huge root": (lambda t: t.comm.broadcast(t.w, 2**40), ts.InvalidArgument, "root is 1099511627776"),
    "huge peer": (lambda t: t.comm.send(t.w, 2**70), ts.InvalidArgument, "peer is"),
    "half a tag": (lambda t: t.comm.send(t.w, 1, 0.5), TypeError, "tag is 0.5"),
    "half a color": (lambda t: t.comm.split(0.5), TypeError, "color is 0.5"),
    "negative size": (lambda t: t.comm.empty(-1), ts.InvalidArgument, "negative size"),
    "huge shape": (lambda t: t.comm.empty((2**40, 2**40)), ts.InvalidArgument, "size in bytes"),
    "huge buffer": (lambda t: t.comm.buffer(2**62), ts.NoMemory, "memory"),
    "half a step": (lambda t: t.saver.save(1.5, t.state), TypeError, "step is 1.5"),
    "huge step": (lambda t: t.saver.save(2**70, t.state), ts.InvalidArgument, "step is"),
    "negative seed": (lambda t: ts.Sampler(t.comm, 5, seed=-1), ts.InvalidArgument, "seed is -1"),
    "half a length": (lambda t: ts.Sampler(t.comm, 4.5), TypeError, "length is 4.5"),
    "huge length": (lambda t: ts.Sampler(t.comm, 2**62).batch(3), ts.NoMemory, "memory"),
    "port": (lambda t: ts.StoreServer(port=99999), ts.InvalidArgument, "the port is 99999"),
    "lr": (lambda t: ts.SGD(t.ddp, lr="high"), TypeError, "lr is 'high'; expected a number"),
    "betas": (lambda t: ts.Adam(t.ddp, betas=0.9), TypeError, "betas is 0.9; it must be a pair"),
    "timeout": (lambda t: ts.init(timeout="5"), TypeError, "timeout is '5'; it must be in seconds or a timedelta"),
    "no time": (lambda t: ts.init(timeout=-1), ts.InvalidArgument, "the timeout is -1000 ms"),
    "no time for a store": (lambda t: ts.Store(t.server.uri, timeout=-1), ts.InvalidArgument, "timeout is -1000 ms"),
    "op": (lambda t: t.comm.all_reduce(t.w, ["sum"]), ts.InvalidArgument, "op is .*sum, avg, min"),
    # steps
    "ready list": (lambda t: t.ddp.ready(["w"]), TypeError, "one by one"),
    "ready half": (lambda t: t.ddp.ready(0.5), TypeError, "names or numbers"),
    "ready huge": (lambda t: t.ddp.ready(2**70), ts.NotFound, "known: w, b"),
    "grad of nothing": (lambda t: t.ddp.grads.__setitem__("x", t.w), ts.NotFound, "known: w, b"),
    "grad of other shape": (
        lambda t: t.ddp.grads.__setitem__("w", np.ones(4, np.float32)),
        ts.InvalidArgument,
        "shape",
    ),
    "grad of other dtype": (
        lambda t: t.ddp.grads.__setitem__("w", np.ones(3)),
        ts.InvalidArgument,
        "float64.*converts",
    ),
    # states
    "function": (lambda t: ts.State(model=lambda: 1), ts.InvalidArgument, "model is a function; .*state_dict"),
    "function inside": (
        lambda t: ts.State(a={"b": [t.ddp, lambda: 1]}),
        ts.InvalidArgument,
        r"a\.b\.1 is a function; .*state_dict",
    ),
    "function later": (lambda t: t.state.__setitem__("f", print), ts.InvalidArgument, "f is a builtin_function"),
    "class": (lambda t: ts.State(model=ts.DDP), ts.InvalidArgument, "model is the class DDP; pass an object"),
    "comm in a state": (lambda t: ts.State(comm=t.comm), ts.InvalidArgument, "comm is a tessera.Comm"),
    "long double in a state": (
        lambda t: ts.State(z=np.ones(2, np.longdouble)),
        ts.InvalidArgument,
        "z: .*(float128|longdouble)",
    ),
    "attribute": (
        lambda t: setattr(t.state, "epoch", 5),
        AttributeError,
        r"no attribute 'epoch'; .*state\['epoch'\] =",
    ),
    "name of a part": (lambda t: t.state.__setitem__(3, 4), TypeError, "the name of a part is 3; it must be a str"),
    # stores, logs, layouts
    "store value": (lambda t: t.store.set("k", 5), TypeError, "the value is a int; it must be bytes or str"),
    "store key": (lambda t: t.store.set(5, b""), TypeError, "the key is 5; expected a str"),
    "store sum": (lambda t: t.store.add("k", 2**63), ts.InvalidArgument, "the number to add"),
    "log level": (lambda t: ts.log.set_level(3.5), TypeError, "log level is a float"),
    "log receiver": (lambda t: ts.log.set_callback(3), TypeError, "receiver is a int"),
    "record": (lambda t: ts.record(3), TypeError, "decorates a function"),
    "placement": (lambda t: ts.Layout((2,), [1], ["x"]), TypeError, "placement 'x'"),
    "name": (lambda t: ts.init(name="a\0b"), ts.InvalidArgument, "zero character"),
}


@pytest.mark.parametrize("call, kind, words", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_in_words_of_python(things: Things, call, kind, words: str):
    with pytest.raises(kind, match=words) as caught:
        call(things)
    assert not re.search(r"tsr_|TSR_|struct_size|_ms\b|NULL", str(caught.value))
    things.comm.barrier()
    assert things.comm.error is None


def test_numbers_of_numpy_are_numbers(things: Things):
    things.comm.broadcast(things.w, np.int32(0))
    things.ddp.ready(np.int64(1))
    assert things.comm.empty(np.int64(4)).shape == (4,)
    assert len(things.data.batch(np.int16(2))) == 2
    things.saver.save(np.int64(2), things.state)


def test_a_gradient_is_assigned_by_copying(things: Things):
    grads = things.ddp.grads
    view = grads["w"]
    grads["w"] = np.arange(3, dtype=np.float32)
    grads["w"] += 1
    grads["b"] *= 0
    assert grads["w"] is view
    assert view.tolist() == [1, 2, 3]
    with pytest.raises(KeyError, match="the model has no gradient of 'x'; known: w, b"):
        grads["x"]
    assert grads.get("x") is None
    assert list(grads) == ["w", "b"]
    assert "w" in repr(grads)


def test_names_may_be_of_any_script(things: Things, tmp_path):
    name = "gewicht_ünï_重み_\U0001f600"
    with ts.Saver(None, tmp_path / "ünï") as saver:
        saver.save(1, ts.State(**{name: np.arange(3.0)}))
    with ts.Checkpoint(tmp_path / "ünï") as checkpoint:
        assert checkpoint[name].tolist() == [0, 1, 2]
    things.store.set(name, name)
    assert things.store.get(name).decode() == name


def test_nothing_is_pickled_or_copied(things: Things):
    for thing in things.all():
        for spread in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="pickled"):
                spread(thing)
        if getattr(thing, "_handle", None) is not None:
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(thing._handle)
    things.comm.barrier()


def test_closed_objects_refuse_every_call(things: Things):
    things.close()
    for call in (
        lambda: things.ddp.wait(),
        lambda: things.ddp.ready("w"),
        lambda: things.opt.step(),
        lambda: things.opt.lr,
        lambda: things.data.batch(1),
        lambda: things.saver.save(2, things.state),
        lambda: things.saver.resume(things.state),
        lambda: things.layout.boxes(0),
        lambda: things.mesh["dp"],
        lambda: things.server.port,
        lambda: things.store.get("a"),
        lambda: things.checkpoint.step,
        lambda: ts.DDP(things.comm, {"w": things.w}),
        lambda: ts.Sampler(things.comm, 3),
        lambda: ts.Saver(things.comm, "x"),
        lambda: ts.State(model=things.ddp)._prepare(),
    ):
        with pytest.raises(ts.InvalidState, match="closed"):
            call()
    for thing in things.all():
        assert repr(thing)


def test_a_handle_is_not_initialised_twice(things: Things):
    from tessera.tensor import tensor

    view = tensor(np.ones(3))
    view.__init__(np.ones(5, np.int8))  # type: ignore[misc]
    assert view.shape == (3,)
    for handle in (things.comm._handle, things.ddp._handle):
        with pytest.raises(TypeError):
            handle.__init__()
    things.comm.barrier()


def test_what_is_collected_in_any_order_does_no_harm():
    names = ("comm", "ddp", "opt", "engine", "of_engine", "state", "grad", "memory", "work")
    for first in names:
        made: dict[str, Any] = {"comm": ts.init()}
        comm = made["comm"]
        made["ddp"] = ts.DDP(comm, {"w": np.ones(1000)})
        made["opt"] = ts.AdamW(made["ddp"])
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
        made["engine"] = ts.Engine(comm, {"u": {"w": np.ones(1000)}}, config)
        made["of_engine"] = made["engine"].optimizer
        made["state"] = ts.State(model=made["ddp"], optim=made["opt"], engine=made["engine"])
        made["state"]._prepare()
        made["grad"] = made["ddp"].grads["w"]
        made["memory"] = comm.empty(1000)
        made["work"] = comm.all_reduce(made["memory"], async_op=True)
        made["cycle"] = made
        comm.close()
        del comm, made[first]
        gc.collect()
        for name in names:
            if name in made and hasattr(made[name], "__array__"):
                made[name][:] = 1
        del made
        gc.collect()


def test_objects_may_be_dropped_by_another_thread(things: Things):
    held = [ts.Sampler(things.comm, 3), things.comm.empty(10), things.comm.barrier(async_op=True)]
    things.comm.barrier()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    things.comm.barrier()


def test_a_receiver_of_the_log_that_raises_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_type))

    def fail(level, line):
        raise LookupError(line)

    ts.log.set_level("debug")
    ts.log.set_callback(fail)
    try:
        with ts.init() as comm:
            comm.barrier()
            with ts.Saver(comm, tmp_path) as saver:
                saver.save(1, ts.State(a=1))
    finally:
        ts.log.set_callback(None)
        ts.log.set_level("warning")
    assert set(reported) <= {LookupError}


class Liar:
    """An object whose array interface is whatever a test says."""

    def __init__(self, **interface: Any) -> None:
        self.array = np.ones(4, np.float32)
        self.__array_interface__ = self.array.__array_interface__ | interface


@pytest.mark.parametrize(
    "interface",
    [
        {"data": None},
        {"data": (None, False)},
        {"data": ("x", False)},
        {"data": (1,)},
        {"typestr": ""},
        {"typestr": "<"},
        {"typestr": None},
        {"typestr": "|V16"},
        {"shape": None},
        {"shape": (-4,)},
        {"shape": (2**62, 2**62)},
        {"shape": (1,) * 99},
        {"shape": ("x",)},
        {"shape": (2**70,)},
        {"strides": (0,)},
        {"strides": (2**40,)},
        {"strides": ()},
    ],
    ids=str,
)
def test_an_array_interface_that_makes_no_sense_is_refused(alone: ts.Comm, interface):
    with pytest.raises((ts.InvalidArgument, TypeError)):
        alone.all_reduce(Liar(**interface))
    alone.barrier()


class Capsule:
    def __init__(self, capsule: Any, device: Any = (1, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


@pytest.mark.parametrize("capsule", [None, 3, "dltensor"], ids=str)
def test_a_dlpack_producer_that_makes_no_sense_is_refused(alone: ts.Comm, capsule):
    for device in ((1, 0), None, (), ("cpu", 0)):
        with pytest.raises((ts.InvalidArgument, TypeError, ValueError, IndexError)):
            alone.all_reduce(Capsule(capsule, device))
    alone.barrier()


def test_exits_in_the_middle_of_everything_are_quiet(program):
    """Interpreter exit with waits, callbacks, saves and daemon threads in flight."""
    text = """
        import sys, threading
        import numpy as np
        import tessera as ts
        token = "5a" * 32
        server = ts.StoreServer(token=token)
        ts.log.set_level("debug")
        ts.log.set_callback(lambda level, line: None)
        comms = []
        def join(rank):
            comms.append(ts.Comm.create(ts.Store(server.uri, token=token), rank, 2, timeout=60))
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        comm = min(comms, key=lambda comm: comm.rank)
        inside = threading.Event()
        def stuck():
            inside.set()
            comm.recv(np.ones(3), 1)
        if sys.argv[1] == "thread":
            threading.Thread(target=stuck, daemon=True).start()
            inside.wait()
        elif sys.argv[1] == "work":
            work = comm.all_reduce(np.ones(1000), async_op=True)
            work.add_done_callback(lambda work: None)
        elif sys.argv[1] == "dropped":
            comm.all_reduce(np.ones(1000), async_op=True)
        elif sys.argv[1].endswith("in a cycle"):
            class Trainer: pass
            trainer = Trainer()
            trainer.itself = trainer
            if "comm" in sys.argv[1]: trainer.comm = comm
            if "plan" in sys.argv[1]:
                trainer.work = comm.prepare("all_reduce", outputs=[np.ones(1 << 20), np.ones(7)])
                trainer.work.start()
            else:
                trainer.work = comm.all_reduce([np.ones(1 << 20), np.ones(7)], async_op=True)
        elif sys.argv[1] == "save":
            saver = ts.Saver(None, sys.argv[2])
            saver.save_async(1, ts.State(x=np.ones(1_000_000)))
    """
    made = program(text)
    cycles = [f"{what} in a cycle" for what in ("work", "work and comm", "plan", "plan and comm")]
    for way in ("thread", "work", "dropped", *cycles, "save"):
        result = made.run(way, str(made.path.parent / "checkpoints"))
        assert (result.returncode, result.stderr) == (0, ""), way


@pytest.mark.parametrize("way", ["kept", "dropped", "collected", "exit", "raise"])
def test_the_interpreter_waits_at_exit_for_saves_in_flight(program, tmp_path, way: str):
    text = """
        import sys, warnings
        import numpy as np
        import tessera as ts
        way, root = sys.argv[1:]
        warnings.simplefilter("ignore", ResourceWarning)
        told = []
        saver = ts.Saver(None, root, write_bytes_per_s=32 << 20, progress=lambda *how: told.append(how))
        work = saver.save_async(1, ts.State(x=np.ones(2 << 20)))  # 16 MiB: half a second
        if way != "kept": del work
        if way == "collected": del saver
        if way == "exit": sys.exit(3)
        if way == "raise": raise ValueError("of the program")
    """
    result = program(text).run(way, str(tmp_path))
    assert result.returncode == {"exit": 3, "raise": 1}.get(way, 0), result.stderr
    assert way == "raise" or result.stderr == ""
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 1
        assert checkpoint["x"].sum() == 2 << 20


def test_a_second_interpreter_gets_an_import_error_at_worst(program):
    text = """
        import tessera
        try:
            import _interpreters as interpreters
            make = interpreters.create
            run = lambda i, code: interpreters.exec(i, code)
        except ImportError:
            import _xxsubinterpreters as interpreters
            make, run = interpreters.create, interpreters.run_string
        other = make()
        try:
            run(other, "try:\\n import tessera\\nexcept ImportError:\\n pass")
        except Exception as error:
            print(type(error).__name__)
        interpreters.destroy(other)
        with tessera.init() as comm:
            comm.barrier()
        print("well")
    """
    result = program(text).run()
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["well"]), result.stderr


def test_many_threads_use_shared_objects_at_once(things: Things):
    failures: list[BaseException] = []

    def hammer() -> None:
        try:
            for _ in range(300):
                for call in (things.comm.barrier, lambda: things.data.batch(1), lambda: things.opt.lr):
                    try:
                        call()
                    except ts.InvalidState as error:
                        assert "another thread" in str(error)
                things.store.add("n", 1)
                assert things.layout.boxes(0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_error_that_cannot_be_printed_still_ends_the_block():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    comm = ts.init()
    with pytest.raises(Mute), comm:
        raise Mute
    assert comm.closed


def test_an_error_of_strange_text_keeps_its_place_before_our_own(ranks):
    def body(comm: ts.Comm):
        if comm.rank == 1:
            raise KeyError("a\0b \udc80 \ud800")
        comm.barrier()

    told, own = ranks.outcomes(2, body)
    assert isinstance(own, KeyError)
    assert own.__context__ is None
    assert "KeyError" in str(told)


def test_of_very_many_names_the_one_that_is_there_twice_is_told_soon(tmp_path):
    many = {f"w.{i:06}": np.zeros(1, np.float32) for i in range(100_000)}
    state = ts.State(**many, w={"000007": np.ones(1), "000009": np.ones(1)})
    told = pytest.raises(ts.InvalidArgument, match=r"two parts of the state have the name 'w\.000007'")
    with ts.Saver(None, tmp_path) as saver, told:
        saver.save(1, state)
