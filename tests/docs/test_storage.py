"""docs/STORAGE.md: its examples run as they stand against a server that speaks S3, or compile where what they name is
far. That in Java is compiled by the binding's own tests (ReadmeTest), which have Hadoop."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from test_readme import indented
from user_programs import AS_IN_THE_BINDING, PREFIX, ROOT, cargo, run

PAGE = (ROOT / "docs" / "STORAGE.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket of the page, found by the environment as every client of S3 does."""
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    try:
        yield
    finally:
        server.stop()


def test_python_saves_into_a_bucket_and_reads_from_it(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saves, reads = examples("python")
    makes, opens = saves.split("checkpoint = ")
    w = np.arange(12, dtype=np.float32)
    with ts.init() as comm:
        names: dict[str, object] = {"comm": comm}
        exec(makes, names)
        saver = names["saver"]
        assert isinstance(saver, ts.Saver)
        saver.save(7, ts.State(w=w), metrics={"loss": 0.5})
        exec("checkpoint = " + opens, names)
        exec(reads, names)
        saver.close()
    printed = capsys.readouterr().out
    assert re.search(r"runs/a/step-00000007-\w{8} 7 \{'loss': 0.5\}\nw ", printed), printed
    with ts.Checkpoint(tmp_path / "whole") as exported:
        assert exported["w"].tolist() == w.tolist()


def test_c_compiles(tmp_path: Path) -> None:
    (code,) = examples("c")
    source = tmp_path / "storage.c"
    source.write_text(
        "#include <stdlib.h>\n#include <tessera/tessera.h>\n"
        "#define CHECK(call) ((call) == TSR_OK ? (void)0 : exit(1))\n"
        "extern tsr_storage_status_fn my_status;\nextern tsr_storage_open_fn my_open;\n"
        "void my_free(void *my_data);\n"
        "void use(tsr_comm *comm, void *my_data, tsr_saver *saver);\n"
        "void use(tsr_comm *comm, void *my_data, tsr_saver *saver) {\n" + indented(code) + "}\n"
    )
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-fsyntax-only"]
    run("cc", *flags, "-I", PREFIX / "include", source, cwd=tmp_path)


def test_rust_saves_and_opens(tmp_path: Path) -> None:
    """With a store in memory: the client of S3 would bring a hundred crates."""
    (code,) = examples("rust")
    of_s3 = re.compile(r"object_store::aws::AmazonS3Builder::from_env\(\).*build\(\)\?")
    code, replaced = of_s3.subn("object_store::memory::InMemory::new()", code)
    assert replaced == 1
    of_bindings = ROOT / "bindings" / "rust"
    (tmp_path / "Cargo.toml").write_text(
        '[package]\nname = "storage-page"\nedition = "2021"\n[dependencies]\nobject_store = "0.12.5"\n'
        f'tessera = {{ path = "{of_bindings}/tessera", features = ["object_store"] }}\n' + AS_IN_THE_BINDING
    )
    shutil.copy(of_bindings / "Cargo.lock", tmp_path)
    (tmp_path / "src").mkdir()
    saving, opening = code.split("let checkpoint")
    (tmp_path / "src" / "main.rs").write_text(
        "use std::sync::Arc;\nuse tessera::{Checkpoint, Comm, ObjectStorage, Saver, State, Tensor};\n"
        "fn main() -> Result<(), Box<dyn std::error::Error>> {\n    let comm = Comm::from_env()?;\n"
        + indented(saving)
        + '    let mut state = State::new().with("w", &Tensor::new(vec![1.0f32; 12], [12])?);\n'
        "    saver.save(7, &state)?;\n    assert_eq!(saver.resume(&mut state)?, 7);\n"
        + indented(f"let checkpoint{opening}")
        + "    assert_eq!(checkpoint.step()?, 7);\n    Ok(comm.finalize()?)\n}\n"
    )
    cargo("run", at=tmp_path)
