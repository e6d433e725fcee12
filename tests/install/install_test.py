"""Installs the library into a new prefix and uses it as a stranger would. Usage: install_test.py BUILD CC CMAKE"""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = sorted((ROOT / "examples" / "c").glob("*.c"))
BUILD, CC, CMAKE = sys.argv[1:4]


def run(*command, **options):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.work = Path(cls.directory.name)
        cls.prefix = cls.work / "prefix"
        run(CMAKE, "--install", BUILD, "--prefix", cls.prefix, "--component", "library")
        cls.pkgconfig = {**os.environ, "PKG_CONFIG_PATH": str(cls.prefix / "lib" / "pkgconfig")}

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def train(self, program, **options):
        with tempfile.TemporaryDirectory(dir=self.work) as checkpoints:
            arguments = ["--data", ROOT / "examples" / "data" / "digits.csv", "--checkpoints", checkpoints]
            first = run(program, *arguments, "--steps", 20, "--save-every", 10, **options)
            self.assertIn("digits: 1 ranks, from the beginning\n", first)
            self.assertRegex(first, r"step 20/20 loss \d\.\d{4}\nheld-out accuracy 0\.\d{4}\n")
            second = run(program, *arguments, "--steps", 30, "--save-every", 10, **options)
            self.assertIn("digits: 1 ranks, resumed after step 20\n", second)
            self.assertNotIn("step 20/", second)

    def test_pkg_config(self):
        flags = run("pkg-config", "--cflags", "--libs", "tessera", env=self.pkgconfig).split()
        self.assertIn("0.1.0", run("pkg-config", "--modversion", "tessera", env=self.pkgconfig))
        program = self.work / "by_pkg_config"
        run(CC, "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1", *SOURCES, "-o", program, *flags, "-lm")
        library_path = {**os.environ, "LD_LIBRARY_PATH": str(self.prefix / "lib")}
        self.train(program, env=library_path)

    def test_find_package(self):
        build = self.work / "by_cmake"
        run(CMAKE, "-S", HERE / "consumer", "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}",
            "-DDIGITS_SOURCES=" + ";".join(map(str, SOURCES)), f"-DCMAKE_C_COMPILER={CC}")  # fmt: skip
        run(CMAKE, "--build", build)
        self.train(build / "digits")

    def test_only_public_files_are_installed(self):
        installed = {str(p.relative_to(self.prefix)) for p in self.prefix.rglob("*") if not p.is_dir()}
        headers = {f"include/tessera/{p.name}" for p in (ROOT / "capi" / "include" / "tessera").glob("*.h")}
        self.assertEqual({name for name in installed if name.startswith("include/")}, headers)
        libraries = {name for name in installed if name.startswith("lib/") and "/" not in name[4:]}
        self.assertEqual(libraries, {"lib/libtessera.so", "lib/libtessera.so.0.1", "lib/libtessera.so.0.1.0"})

    def test_programs_ask_for_the_minor_version(self):
        output = run("readelf", "-d", self.prefix / "lib" / "libtessera.so")
        self.assertRegex(output, r"SONAME.*\[libtessera\.so\.0\.1\]")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
