"""Makes tests/fuzz/corpus anew: sound files of each kind, and hostile ones by hand. Needs the package tessera alone.

What a fuzzer found is added as found-<what>: crashes by hand, what reaches more by `./dev fuzz --merge`. It is left
alone here.
"""

import io
import json
import pickle
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import tessera as ts

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
GOLDEN = HERE.parent / "golden" / "torch_dcp"


def put(target: str, name: str, content: bytes) -> None:
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    (CORPUS / target / name).write_bytes(content)


def sound() -> None:
    newest = max(GOLDEN.glob("2.*"), key=lambda path: [int(n) for n in path.name.split(".")])
    for version in sorted(GOLDEN.glob("2.*")):
        put("metadata", f"torch-{version.name}", (version / "dcp" / ".metadata").read_bytes())
    save = (newest / "save.pt").read_bytes()
    put("zip", "save", save)
    put("archive", "save", save)
    put("pickle", "metadata", (newest / "dcp" / ".metadata").read_bytes())
    with zipfile.ZipFile(io.BytesIO(save)) as archive:
        put("pickle", "save", archive.read("save/data.pkl"))
    item = (newest / "dcp" / "__0_0.distcp").read_bytes()
    end = item.index(b"PK\x05\x06") + 22
    put("zip", "item", item[:end])
    put("archive", "item", item[:end])
    plain = {"a": [1, -5, 2**40, -(2**70), 2.5, True, None, "ü", b"x"], "t": (1, (2,), {}), 3: {"k": [[]]}, "s": {1}}
    for protocol in range(2, 6):
        put("pickle", f"plain-{protocol}", pickle.dumps({k: v for k, v in plain.items() if k != "s"}, protocol))
    put("pickle", "ordered", pickle.dumps(OrderedDict([("b", 1), ("a", OrderedDict())]), 2))
    with tempfile.TemporaryDirectory() as directory:
        state = ts.State()
        state["a"] = np.arange(12, dtype="float32").reshape(3, 4)
        state["b.c"] = np.arange(5, dtype="int64")
        state["note"] = {"v": (1, 2.5, None, b"x", 2**80)}
        with ts.Saver(None, directory, format="torch_dcp") as saver:
            saver.save(1, state)
        put("metadata", "tessera", next(Path(directory).glob("step-*/.metadata")).read_bytes())
        put(
            "archive",
            "tessera",
            (data := next(Path(directory).glob("step-*/*.distcp")).read_bytes())[: data.index(b"PK\5\6") + 22],
        )
        put("manifest", "torch_dcp", next(Path(directory).glob("step-*/manifest.json")).read_bytes())
    with tempfile.TemporaryDirectory() as directory:
        state = ts.State()
        state["a"] = np.arange(5, dtype="float32")
        state["b"] = np.arange(8, dtype="uint8")
        state["note"] = {"v": (1, 2.5, None, b"x", 2**80), "nan": float("nan")}
        with ts.Saver(None, directory) as saver:
            saver.save(1, state)
        put("manifest", "native", next(Path(directory).glob("step-*/manifest.json")).read_bytes())
        file = next(Path(directory).glob("step-*/*.safetensors")).read_bytes()
        put("safetensors", "native", file[: 8 + struct.unpack("<Q", file[:8])[0]])


def pickles() -> None:
    hostile = {
        "empty": b"",
        "stop": b".",
        "truncated-length": b"\x80\x02X\xff\xff\xff\xff",
        "length-of-8": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        "negative-memo": b"\x80\x02h\x05.",
        "sparse-memo": b"\x80\x02"
        + b"".join(b"Nr" + struct.pack("<I", 2**32 - 1 - i) + b"0" for i in range(50))
        + b"N.",
        "protocol-9": b"\x80\x09N.",
        "protocol-0": b"I1\n.",
        "trailing": b"\x80\x02N.N",
        "two-values": b"\x80\x02NN.",
        "setitem-on-list": b"\x80\x02]NNs.",
        "append-on-dict": b"\x80\x02}Na.",
        "build-on-list": b"\x80\x02]Nb.",
        "below-mark": b"\x80\x02N(0R.",
        "tuple-below-mark": b"\x80\x02NN(\x86.",
        "reduce-of-none": b"\x80\x02NNR.",
        "odd-items": b"\x80\x02}(Nu.",
        "system": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        "eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x01a\x85R.",
        "dotted": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "extension-2": b"\x80\x02\x83\x01\x00.",
        "extension-4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "unknown-opcode": b"\x80\x02\xff.",
        "inst": b"(ios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.",
        "long-name": b"\x80\x02c" + b"a" * 3000 + b"\nb\n.",
        "deep-lists": b"\x80\x02" + b"]" * 20000 + b"a" * 19999 + b".",
        "deep-tuples": b"\x80\x02N" + b"\x85" * 20000 + b".",
        "deep-marks": b"\x80\x02" + b"(" * 20000 + b".",
        "cycle": b"\x80\x02]q\x00h\x00a.",
        "dict-cycle": b"\x80\x02}q\x00Nh\x00s.",
        "bomb": b"\x80\x02Nq\x00"
        + b"".join(b"0h" + bytes([i]) + b"2\x86q" + bytes([i + 1]) for i in range(200))
        + b".",
        "text-bomb": b"\x80\x02X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00]" + b"(" + b"h\x00" * 5000 + b"e.",
        "huge-integer": b"\x80\x02\x8b" + struct.pack("<I", 5000) + b"\x7f" * 5000 + b".",
        "integer-of-2-gib": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "surrogate": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
        "key-twice": b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u.",
        "newobj-ex": b"\x80\x04\x8c\x01a\x8c\x01b\x93)}\x92.",
        "persistent": b"\x80\x02NQ.",
        "persistent-text": b"\x80\x02Pstorage\n.",
    }
    for name, content in hostile.items():
        put("pickle", name, content)
        put("metadata", f"pickle-{name}", content)


class Writer:
    """Just enough of a pickle writer to lie in metadata."""

    META = "torch.distributed.checkpoint.metadata"

    def text(self, value: str) -> bytes:
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def value(self, value: object) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return self.text(value)
        if value is None:
            return b"N"
        if isinstance(value, int):
            return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        if isinstance(value, list):
            return b"](" + b"".join(map(self.value, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(self.value(k) + self.value(v) for k, v in value.items()) + b"u"
        raise TypeError(value)

    def obj(self, name: str, module: str | None = None, **fields: object) -> bytes:
        return f"c{module or self.META}\n{name}\n".encode() + b")\x81" + self.value(dict(fields)) + b"b"

    def size(self, *numbers: int) -> bytes:
        return b"ctorch\nSize\n(" + b"".join(map(self.value, numbers)) + b"t\x85R"

    def metadata(self, **changes: object) -> bytes:
        fields: dict[str, object] = {
            "path": "__0_0.distcp",
            "offset": 0,
            "length": 100,
            "size": self.size(4),
            "chunks": [self.obj("ChunkStorageMetadata", offsets=self.size(0), sizes=self.size(4))],
            "index": self.size(0),
            "dtype": b"ctorch\nfloat32\n",
            "info": "_StorageInfo",
            "transforms": None,
        } | changes
        properties = f"c{self.META}\nTensorProperties\n".encode() + b")\x81(" + self.value(fields["dtype"]) + b"NNNNtb"
        tensor = self.obj("TensorStorageMetadata", properties=properties, size=fields["size"], chunks=fields["chunks"])
        place = self.obj(
            str(fields["info"]),
            "torch.distributed.checkpoint.filesystem",
            relative_path=fields["path"],
            offset=fields["offset"],
            length=fields["length"],
            transform_descriptors=fields["transforms"],
        )
        key = self.obj("MetadataIndex", fqn="a", offset=fields["index"], index=0)
        entries = {"a": tensor} | ({"b": tensor} if changes.get("two") else {})
        return b"\x80\x02" + self.obj("Metadata", state_dict_metadata=entries, storage_data={key: place}) + b"."


def metadata() -> None:
    writer = Writer()
    size, chunk = writer.size, lambda o, s: writer.obj("ChunkStorageMetadata", offsets=size(*o), sizes=size(*s))
    put("metadata", "made", writer.metadata())
    hostile: dict[str, dict[str, object]] = {
        "traversal": {"path": "../secret"},
        "inner-traversal": {"path": "a/../../secret"},
        "absolute": {"path": "/etc/passwd"},
        "nul": {"path": "a\0b"},
        "empty-path": {"path": ""},
        "dot": {"path": "./a"},
        "negative-offset": {"offset": -1},
        "overflow": {"offset": 2**63 - 1, "length": 2**63 - 1},
        "beyond-64": {"offset": 2**70},
        "negative-size": {"size": size(-4)},
        "huge-size": {"size": size(2**62, 2**62)},
        "nine-dims": {"size": size(*[1] * 9)},
        "outside": {"chunks": [chunk([2], [4])]},
        "hole": {"chunks": [chunk([0], [3])]},
        "overlap": {"chunks": [chunk([0], [3]), chunk([2], [2])]},
        "twice": {"chunks": [chunk([0], [4]), chunk([0], [4])]},
        "other-dims": {"chunks": [chunk([0, 0], [4, 1])]},
        "no-place": {"index": size(1)},
        "dtype": {"dtype": b"cos\nsystem\n"},
        "quantised": {"dtype": b"ctorch\nquint8\n"},
        "other-storage": {"info": "_RdmaObjectInfo"},
        "transformed": {"transforms": ["stream.zstd/1"]},
        "transform-class": {"transforms": [b"cos\nsystem\n"]},
        "second-without-place": {"two": True},
        "chunk-bomb": {"size": size(4), "chunks": b"](" + chunk([0], [4]) + b"q\x00" + b"h\x00" * 3000 + b"e"},
    }
    for name, changes in hostile.items():
        put("metadata", name, writer.metadata(**changes))
    put("metadata", "not-metadata", pickle.dumps({"a": 1}))


def zips() -> None:
    def archive(
        compression: int = zipfile.ZIP_STORED, comment: bytes = b"", names: tuple[str, ...] = ("data.pkl", "data/0")
    ) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", compression) as made:
            for name in names:
                made.writestr(
                    zipfile.ZipInfo(f"archive/{name}"), b"\x80\x02N." if name == "data.pkl" else b"x" * 100, compression
                )
            made.comment = comment
        return out.getvalue()

    good = archive()
    put("zip", "python", good)
    end = good.rindex(b"PK\5\6")
    central = good.index(b"PK\1\2")

    def patched(at: int, data: bytes) -> bytes:
        return good[:at] + data + good[at + len(data) :]

    def zip64(size: int, packed: int) -> bytes:
        """One entry of 4 bytes, whose sizes stand in the extra field of the directory."""
        name, data, crc = b"archive/data.pkl", b"\x80\x02N.", zlib.crc32(b"\x80\x02N.")
        local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 33, crc, 4, 4, len(name), 0) + name + data
        sizes = struct.pack("<2H2Q", 1, 16, size, packed)
        fixed = struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 33, crc, 2**32 - 1, 2**32 - 1, len(name),
                            len(sizes), 0, 0, 0, 0, 0)  # fmt: skip
        directory = fixed + name + sizes
        return local + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(local), 0)

    put("zip", "zip64", zip64(4, 4))
    put("archive", "zip64", zip64(4, 4))
    hostile = {
        "zip64-size": zip64(2**40, 2**40),
        "zip64-size-differs": zip64(4, 3),
        "absolute-name": good.replace(b"archive/data/0", b"/etc/passwd.so"),
        "compressed": archive(zipfile.ZIP_DEFLATED),
        "comment": archive(comment=b"x"),
        "no-folder": archive(names=("data.pkl", "../../data/0")),
        "count": patched(end + 8, b"\xff\xff\xff\xff"),
        "directory-outside": patched(end + 16, b"\xff\xff\xff\x7f"),
        "directory-size": patched(end + 12, b"\x00\x00\x00\x00"),
        "encrypted": patched(central + 8, b"\x01\x00"),
        "size": patched(central + 20, b"\xf0\xff\xff\x7f\xf0\xff\xff\x7f"),
        "size-differs": patched(central + 20, b"\x03\x00\x00\x00"),
        "header-outside": patched(central + 42, b"\xff\xff\xff\x7f"),
        "checksum": patched(central + 16, b"\x00\x00\x00\x01"),
        "local-name": patched(30, b"b"),
        "local-extra": patched(28, b"\xff\xff"),
        "both-at-0": good.replace(
            struct.pack("<I", good.index(b"PK\3\4", 4)) + b"archive/data/0", struct.pack("<I", 0) + b"archive/data/0"
        ),
        "same-name": archive(names=("data.pkl", "data/pkl")).replace(b"data/pkl", b"data.pkl"),
        "end-alone": good[end:],
        "zip64-locator": good[:end] + b"PK\6\7" + bytes(4) + struct.pack("<QI", 2**60, 1) + good[end:],
        "empty": b"",
    }
    for name, content in hostile.items():
        put("zip", name, content)
        put("archive", f"zip-{name}", content)

    def save(data_pkl: bytes, storage: bytes = bytes(16), **entries: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as made:
            for name, content in {"data.pkl": data_pkl, "data/0": storage, "version": b"3\n", **entries}.items():
                made.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
        return out.getvalue()

    def tensor(
        offset: int = 0,
        size: tuple[int, ...] = (4,),
        stride: tuple[int, ...] = (1,),
        count: int = 4,
        key: str = "0",
        storage: str = "FloatStorage",
    ) -> bytes:
        w = Writer()
        tuple_of = lambda numbers: b"(" + b"".join(map(w.value, numbers)) + b"t"  # noqa: E731
        pid = (
            b"("
            + w.text("storage")
            + f"ctorch\n{storage}\n".encode()
            + w.text(key)
            + w.text("cpu")
            + w.value(count)
            + b"tQ"
        )
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + pid
            + w.value(offset)
            + tuple_of(size)
            + tuple_of(stride)
            + b"\x89}tR"
        )

    put("archive", "made", save(b"\x80\x02" + tensor() + b"."))
    for name, content in {
        "leaves-storage": tensor(offset=1),
        "negative-offset": tensor(offset=-1),
        "count-differs": tensor(count=5),
        "count-overflows": tensor(count=2**62),
        "stride-overflows": tensor(size=(4, 2), stride=(2**62, 1)),
        "overlapping": tensor(size=(2, 2), stride=(1, 1)),
        "expanded": tensor(size=(3, 4), stride=(0, 1)),
        "stride-negative": tensor(size=(4,), stride=(-1,)),
        "strides-differ": tensor(size=(4,), stride=(1, 1)),
        "huge": tensor(size=(2**40, 2**40), stride=(0, 0)),
        "no-storage": tensor(key="1"),
        "other-file": tensor(key="../data/0"),
        "quantised": tensor(storage="QInt8Storage"),
    }.items():
        put("archive", name, save(b"\x80\x02" + content + b"."))
    put("archive", "big-endian", save(b"\x80\x02N.", byteorder=b"big"))
    put("archive", "torchscript", save(b"\x80\x02N.", **{"constants.pkl": b"\x80\x02)."}))


def safetensors() -> None:
    """Files and indices as Hugging Face has them, and what a forger may make of them."""

    def file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    def parts(offsets: object) -> dict:
        return {
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": offsets}})},
            "a": entry("U8", [2], 0, 2),
        }

    files = {
        "sound": file({"__metadata__": {"format": "pt", "tied": "a"}, "a": entry("F32", [2, 1], 0, 8)}, bytes(8)),
        "padded": file(json.dumps({"a": entry("U8", [2], 0, 2)}).encode() + b"   ", b"ab"),
        "none": file({}),
        "null-metadata": file({"__metadata__": None}),
        "part": file(parts([3]), b"ab"),
        "fp4": file({"a": entry("F4", [4], 0, 2)}, b"ab"),
        "every-dtype": file(
            {
                d: entry(d, [0], 0, 0)
                for d in [
                    "BOOL",
                    "U8",
                    "I8",
                    "F8_E5M2",
                    "F8_E4M3",
                    "F8_E8M0",
                    "I16",
                    "U16",
                    "F16",
                    "BF16",
                    "I32",
                    "U32",
                    "F32",
                    "C64",
                    "F64",
                    "I64",
                    "U64",
                    "F6_E2M3",
                ]
            }
        ),
        "zero-dim": file({"a": entry("F32", [0, 2**63 - 1, 2**63 - 1], 0, 0)}),
        "nine-dims": file({"a": entry("U8", [1] * 9, 0, 1)}, b"a"),
        "header-2-63": file({}, length=2**63),
        "header-huge": file({}, length=100_000_001),
        "header-too-long": file({}, length=3),
        "short": b"\0\0\0",
        "empty": b"",
        "array": file(b"[]"),
        "space-first": file(b" {}"),
        "overlap": file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"),
        "same-range": file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"ab"),
        "hole": file({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"),
        "trailing": file({"a": entry("U8", [1], 0, 1)}, b"ab"),
        "key-twice": file(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],'
            b'"data_offsets":[0,1]}}',
            b"a",
        ),
        "metadata-twice": file(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"b"}}'),
        "metadata-number": file({"__metadata__": {"a": 1}}),
        "backwards": file({"a": entry("U8", [0], 1, 0)}, b"a"),
        "outside": file({"a": entry("U8", [99], 0, 99)}, b"a"),
        "negative": file({"a": entry("U8", [-1], 0, 1)}, b"a"),
        "product-overflows": file({"a": entry("F32", [2**32, 2**32], 0, 0)}),
        "product-wraps": file({"a": entry("F64", [2**61, 8, 1], 0, 0)}),
        "beyond-64": file({"a": entry("U8", [2**64], 0, 0)}),
        "size-differs": file({"a": entry("F32", [1], 0, 8)}, bytes(8)),
        "real-shape": file({"a": entry("U8", [1.0], 0, 1)}, b"a"),
        "no-dtype": file({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"a"),
        "deep": file(b'{"a":' + b"[" * 5000, b""),
        "bad-utf8": file(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"),
        "control-name": file({"a\n": entry("U8", [1], 0, 1)}, b"a"),
        "empty-name": file({"": entry("U8", [1], 0, 1)}, b"a"),
        "offsets-other-dims": file(parts([0, 0]), b"ab"),
        "offsets-negative": file(parts([-1]), b"ab"),
        "offsets-overflow": file(parts([2**63 - 1]), b"ab"),
        "offsets-no-json": file({"__metadata__": {"DCP_SHARDING_INFO": "["}}),
    }
    for name, content in files.items():
        put("safetensors_file", name, content)

    def index(weight_map: object, **more: object) -> bytes:
        return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}).encode()

    indices = {
        "sound": index({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
        "none": index({}),
        "more": index({"a": "m.safetensors"}, other=[{"x": [1, None]}]),
        "traversal": index({"a": "../x.safetensors"}),
        "inner-traversal": index({"a": "x/../../y.safetensors"}),
        "absolute": index({"a": "/etc/x.safetensors"}),
        "backslash": index({"a": "..\\x.safetensors"}),
        "nul": index({"a": "x\0.safetensors"}),
        "dots": index({"a": ".."}),
        "empty-file": index({"a": ""}),
        "ending-alone": index({"a": ".safetensors"}),
        "other-ending": index({"a": "x.bin"}),
        "long-file": index({"a": "x" * 300 + ".safetensors"}),
        "empty-name": index({"": "x.safetensors"}),
        "number": index({"a": 1}),
        "list": index([]),
        "no-map": b'{"metadata":{}}',
        "key-twice": b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        "map-twice": b'{"weight_map":{},"weight_map":{}}',
        "trailing": index({}) + b"{}",
        "deep": b'{"weight_map":' + b'{"a":' * 5000,
        "empty": b"",
    }
    for name, content in indices.items():
        put("safetensors_index", name, content)


SAVE_ID = "86713d2d-3682-409b-9641-fe0b59765f64"


def rank_headers() -> None:
    """Headers of rank files with 28 bytes of data."""

    def header(text: object) -> bytes:
        body = text if isinstance(text, bytes) else json.dumps(text, separators=(",", ":")).encode()
        body += b" " * (-(8 + len(body)) % 4096)
        return struct.pack("<Q", len(body)) + body

    def rank_file(entries: object, offsets: object = None, **other: object) -> dict[str, object]:
        if offsets is None:
            offsets = {name: {"saved_offsets": [0] * len(entry["shape"])} for name, entry in entries.items()}
        own = {"save_id": SAVE_ID, "block_bytes": 2**20, "crc32c": "00000000", **other}
        sharding = offsets if isinstance(offsets, str) else json.dumps(offsets)
        metadata = {"tessera": json.dumps(own, separators=(",", ":")), "DCP_SHARDING_INFO": sharding}
        return {"__metadata__": {**metadata, "DCP_VERSION": "1.0", "format": "pt"}, **entries}

    def entry(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    one = {"a": entry([7], 0, 28)}
    two = {"a": entry([5], 0, 20), "b": entry([8], 20, 28, "U8")}
    plain = json.dumps(rank_file(one), separators=(",", ":")).encode()
    files = {
        "two": rank_file(two),
        "mixed-order": rank_file(
            dict(reversed(two.items())), {"b": {"saved_offsets": [9]}, "a": {"saved_offsets": [3]}}
        ),
        "empty-and-scalar": rank_file({"e": entry([0, 3], 0, 0), "s": entry([], 0, 4), "a": entry([6], 4, 28)}),
        "unpadded": struct.pack("<Q", len(plain)) + plain,
        "overlap": rank_file({"a": entry([5], 0, 20), "b": entry([12], 16, 28, "U8")}),
        "hole": rank_file({"a": entry([5], 0, 20), "b": entry([4], 24, 28, "U8")}),
        "beyond": rank_file({"a": entry([8], 0, 32)}),
        "short": rank_file({"a": entry([6], 0, 24)}),
        "backwards": rank_file({"a": entry([7], 28, 0)}),
        "negative-range": rank_file({"a": entry([7], -28, 0)}),
        "negative-shape": rank_file({"a": entry([-7], 0, 28)}),
        "overflow": rank_file({"a": entry([2**32, 2**32], 0, 28)}),
        "overflow-behind-zero": rank_file({"a": entry([2**62, 2**62, 0], 0, 0), "b": entry([7], 0, 28)}),
        "beyond-64-bits": rank_file({"a": entry([2**64], 0, 28)}),
        "dimensions": rank_file({"a": entry([1] * 8 + [7], 0, 28)}),
        "unaligned": rank_file({"a": entry([1], 0, 1, "U8"), "b": entry([6], 1, 25), "c": entry([3], 25, 28, "U8")}),
        "dtype": rank_file({"a": entry([7], 0, 28, "Q9")}),
        "no-dtype": rank_file({"a": {"shape": [7], "data_offsets": [0, 28]}}),
        "one-offset": rank_file({"a": {"dtype": "F32", "shape": [7], "data_offsets": [0]}}),
        "name-twice": plain[:-1] + b',"a":' + json.dumps(one["a"]).encode() + b"}",
        "field-twice": plain.replace(b'"dtype":"F32"', b'"dtype":"F32","dtype":"F32"'),
        "metadata-twice": plain[:-1] + b',"__metadata__":{}}',
        "offsets-of-none": rank_file(one, {"b": {"saved_offsets": [0]}}),
        "offsets-missing": rank_file(one, {}),
        "offsets-twice": rank_file(one, '{"a":{"saved_offsets":[0]},"a":{"saved_offsets":[1]}}'),
        "offsets-negative": rank_file(one, {"a": {"saved_offsets": [-1]}}),
        "offsets-dimensions": rank_file(one, {"a": {"saved_offsets": [0, 0]}}),
        "offsets-list": rank_file(one, "[]"),
        "offsets-no-json": rank_file(one, "{"),
        "crc-short": rank_file(one, crc32c="0000000"),
        "crc-no-number": rank_file(one, crc32c="0000000g"),
        "block-bytes": rank_file(one, block_bytes=2**21),
        "no-metadata": one,
        "list": [],
        "deep": b'{"a":' + b"[" * 3000,
        "bad-utf8": plain.replace(b'"a"', b'"\xff"'),
        "trailing": plain + b"{}",
    }
    for name, content in files.items():
        put("safetensors", name, content if name == "unpadded" else header(content))
    put("safetensors", "length", struct.pack("<Q", 2**63) + b"{}")
    put("safetensors", "twice", struct.pack("<Q", 20) + b'{"a":{},"a":{}}     ')
    put("safetensors", "empty", b"")


def manifests() -> None:
    """Their checksums are made by the target."""

    two = [[f"rank-{rank:05}.safetensors", 4096, "00000000"] for rank in range(2)]

    def manifest(
        tensors: object, files: object = None, *, mesh: object = None, placements: object = None, **more: object
    ):
        head = {
            "format": "tessera", "version": 1, "sequence": 1, "step": 1, "save_id": SAVE_ID, "committed": "",
            "writer": {"library": "", "language": "", "version": ""}, "world_size": 2,
            "meshes": [{"sizes": mesh or [2]}], "layouts": [{"mesh": 0, "placements": placements or ["S(0)"]}],
            "files": two if files is None else files,
            "tensors": tensors, "aliases": {}, "values": {}, "metrics": {},
        }  # fmt: skip
        return json.dumps(head | more, separators=(",", ":")).encode()[:-1] + b',"crc32c":"00000000"}\n'

    def tensor(shape: object, **more: object) -> dict[str, object]:
        return {"dtype": "F32", "shape": shape, "layout": 0} | more

    def boxes(*parts: object, shape: object = (4,)) -> dict[str, object]:
        return {"a": {"dtype": "F32", "shape": list(shape), "boxes": list(parts)}}

    a = {"a": tensor([4, 3])}
    whole = [[0], [4], 0]
    files = {
        "sharded": manifest(a),
        "uneven": manifest({"a": tensor([3, 3]), "b": tensor([1]), "e": tensor([0, 4])}),
        "mesh": manifest(a, mesh=[2, 1], placements=["R", "S(1)"]),
        "split": manifest({"a": tensor([4, 3], split=3, files=[[0, 2, 1], 1, [1, 2, -1], 0])}),
        "boxes": manifest(boxes([[0], [3], 0], [[3], [1], 1])),
        "tied": manifest(a, aliases={"b": "a"}),
        "values": manifest({}, values={"x": [1, 2.5, None, {"~": "double", "v": "nan"}]}, metrics={"loss": 0.5}),
        "version": manifest({}, version=2),
        "sequence-last": manifest({}, sequence=2**53),
        "path": manifest({}, [["../rank-00000.safetensors", 1, "00000000"]]),
        "path-absolute": manifest({}, [["/etc/passwd", 1, "00000000"]]),
        "file-twice": manifest({}, [["rank-00000.safetensors", 1, "00000000"]] * 2),
        "file-size": manifest({}, [["rank-00000.safetensors", -1, "00000000"]]),
        "file-crc": manifest({}, [["rank-00000.safetensors", 1, "0000000g"]]),
        "file-fields": manifest({}, [["rank-00000.safetensors", 1]]),
        "layout-number": manifest({"a": tensor([4], layout=1)}),
        "layout-negative": manifest({"a": tensor([4], layout=-1)}),
        "layout-dimension": manifest(a, placements=["S(2)"]),
        "placement": manifest({}, placements=["P"]),
        "placements-two": manifest({}, placements=["R", "R"]),
        "mesh-number": manifest({}, layouts=[{"mesh": 1, "placements": ["R"]}]),
        "mesh-none": manifest({}, meshes=[{"sizes": []}], layouts=[{"mesh": 0, "placements": []}]),
        "shards-empty": manifest({f"t{i}": tensor([0, i + 1]) for i in range(64)}, mesh=[2**20], world_size=2**20),
        "mesh-zero": manifest(a, mesh=[0]),
        "mesh-large": manifest(a, mesh=[2**20, 2**20], placements=["R", "R"]),
        "mesh-of-another-world": manifest(a, mesh=[3]),
        "split-zero": manifest({"a": tensor([4], split=0)}),
        "split-large": manifest({"a": tensor([4], split=2**20)}),
        "split-scalar": manifest({"a": tensor([], split=2)}, placements=["R"]),
        "files-too-few": manifest({"a": tensor([4], files=[0])}),
        "files-too-many": manifest({"a": tensor([4], files=[[0, 2], 1])}),
        "files-beyond": manifest({"a": tensor([4], files=[[0, 2, 2]])}),
        "files-negative": manifest({"a": tensor([4], files=[[0, 2, -1]])}),
        "files-huge": manifest({"a": tensor([4], files=[[0, 2**31]])}),
        "files-none": manifest(a, []),
        "boxes-overlap": manifest(boxes([[0], [3], 0], [[2], [2], 1])),
        "boxes-twice": manifest(boxes(whole, whole)),
        "boxes-hole": manifest(boxes([[0], [3], 0])),
        "boxes-outside": manifest(boxes([[2], [4], 0])),
        "boxes-overflow": manifest(boxes([[2**63 - 1], [2**63 - 1], 0])),
        "boxes-file": manifest(boxes([[0], [4], 2])),
        "boxes-dimensions": manifest(boxes([[0, 0], [4, 1], 0])),
        "boxes-fields": manifest(boxes([[0], [4]])),
        "shape-negative": manifest({"a": tensor([-4])}),
        "shape-overflow": manifest({"a": tensor([2**62, 2**62])}),
        "shape-real": manifest({"a": tensor([4.0])}),
        "dimensions": manifest({"a": tensor([1] * 9)}),
        "dtype": manifest({"a": tensor([4], dtype="Q9")}),
        "no-shape": manifest({"a": {"dtype": "F32", "layout": 0}}),
        "name-empty": manifest({"": tensor([4])}),
        "name-control": manifest({"a\n": tensor([4])}),
        "name-long": manifest({"a" * 1025: tensor([4])}),
        "name-twice": manifest(a).replace(b'"aliases"', b'"tensors":{},"aliases"'),
        "tensor-twice": manifest(a).replace(b'"a":{', b'"a":{},"a":{'),
        "alias-of-nothing": manifest(a, aliases={"b": "c"}),
        "alias-of-itself": manifest(a, aliases={"a": "a"}),
        "alias-of-alias": manifest(a, aliases={"b": "a", "c": "b"}),
        "alias-empty": manifest(a, aliases={"": "a"}),
        "alias-nul": manifest(a, aliases={"b\0c": "a"}),
        "value-empty": manifest(a, values={"": 1}),
        "value-nul": manifest(a, values={"v\0w": 1}),
        "value-tag": manifest({}, values={"x": {"~": "object", "v": "os.system"}}),
        "value-deep": manifest({}, values={"x": json.loads("[" * 70 + "]" * 70)}),
        "dcp-with-tensors": manifest(a, format="torch_dcp"),
        "other-format": manifest({}, format="pickle"),
        "no-tensors": manifest({}).replace(b'"tensors"', b'"tensor"'),
        "truncated": manifest(a)[:200],
        "deep": manifest({}).replace(b'"tensors":{}', b'"tensors":' + b"[" * 3000),
        "empty": b"{}",
    }
    for name, content in files.items():
        put("manifest", name, content)


def store() -> None:
    def frame(operation: int, key: bytes, rest: bytes = b"", claimed: int | None = None) -> bytes:
        body = struct.pack("<BH", operation, len(key) if claimed is None else claimed) + key + rest
        return struct.pack("<I", len(body)) + body

    requests = {
        "set": frame(1, b"key", b"value"),
        "set-empty": frame(1, b"key"),
        "get": frame(2, b"key"),
        "wait": frame(3, "schlüssel".encode()),
        "add": frame(4, b"key", struct.pack("<q", -5)),
        "compare": frame(5, b"key", struct.pack("<BI", 1, 3) + b"old" + b"new"),
        "compare-absent": frame(5, b"key", b"\0" + b"new"),
        "delete": frame(6, b"key"),
        "cancel": frame(7, b""),
        "no-key": frame(2, b""),
        "operation-0": frame(0, b"key"),
        "operation-8": frame(8, b"key"),
        "key-beyond-frame": frame(2, b"key", claimed=0xFFFF),
        "get-goes-on": frame(2, b"key", b"more"),
        "add-short": frame(4, b"key", b"1234567"),
        "add-long": frame(4, b"key", b"123456789"),
        "compare-beyond-frame": frame(5, b"key", struct.pack("<BI", 1, 0xFFFFFFFF) + b"old"),
        "length-huge": b"\xff\xff\xff\xff" + bytes(8),
        "length-zero": bytes(4),
        "two": frame(2, b"key") * 2,
        "empty": b"",
    }
    for name, content in requests.items():
        put("store_request", name, content)

    def hello(magic: bytes = b"TSRSTORE", version: int = 1, mode: int = 1) -> bytes:
        return magic + struct.pack("<HHQ", version, mode, 3) + bytes(range(32)) + bytes(range(32, 64))

    answer = b"TSRSTORE" + struct.pack("<HBBQ", 1, 1, 0, 3) + bytes(64)
    hellos = {
        "sound": hello(),
        "answer": answer,
        "answer-refuses": answer[:11] + b"\1" + answer[12:],
        "answer-unknown-mode": answer[:10] + b"\xee" + answer[11:],
        "insecure": hello(mode=0),
        "tls": hello(mode=2),
        "mode-257": hello(mode=257),
        "version-2": hello(version=2),
        "http": b"GET / HTTP/1.1\r\n\r\n" + bytes(80),
        "client-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(90),
        "short": hello()[:83],
        "empty": b"",
    }
    for name, content in hellos.items():
        put("store_hello", name, content)


def main() -> None:
    for path in CORPUS.glob("*/*"):
        if not path.name.startswith("found-"):
            path.unlink()
    sound()
    pickles()
    metadata()
    zips()
    safetensors()
    rank_headers()
    manifests()
    store()
    print(f"{len(list(CORPUS.glob('*/*')))} inputs in {CORPUS}", file=sys.stderr)


if __name__ == "__main__":
    main()
    shutil.rmtree(HERE / "__pycache__", ignore_errors=True)
