"""Who removes or writes by a path may be led elsewhere by who swaps a directory on it for a link. So all that lists,
makes, writes, renames or removes goes by descriptors, through src/base/dir_at, and no other file calls the system for
it but those below, each for its reason."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("src", "capi", "cli")
ALLOWED = {
    "src/base/dir_at.cc": "is the place",
    "src/launch/events.cc": "writes the file that the user names, as a shell's > does",
    "src/launch/binding.cc": "lists /sys and /proc, below the root of a test",
    "src/launch/process.cc": "lists /proc",
    "src/launch/agent_page.cc": "empties the file whose path the agent gave it",
    "src/store/file_store.cc": "by the descriptor of the store's directory",
    "src/store/token.cc": "in a directory that was found to be this user's alone",
    "cli/trace/flights.cc": "lists what the user names, to read it",
}
SUFFIXES = (".c", ".cc", ".h", ".hpp")
CALL = re.compile(
    # Names that are the system's alone, and names that methods have too, where they are told apart by `::`.
    r"(?<![\w.>:])(?:::)?(?:unlink|unlinkat|rmdir|mkdir|mkdirat|renameat2?|linkat|symlink|symlinkat|creat|mknod"
    r"|mknodat|opendir|fdopendir|readdir|scandir|n?ftw|fopen|utimensat|l?chown|fchownat|chmod|fchmodat)\s*\("
    r"|(?<![\w>])::(?:rename|link|remove|truncate)\s*\("
    r"|\bstd::(?:remove|rename|fopen)\s*\("
    r"|\bstd::(?:ofstream|fstream)\b"
    r"|\bfilesystem::(?:remove|remove_all|rename|copy|copy_file|create_\w+|resize_file|permissions)\s*\("
    r"|\bfilesystem::(?:recursive_)?directory_iterator\b"
    r"|(?<![\w.>])::open(?:at)?\((?:[^;]|\n)*?\b(?:O_(?:CREAT|TRUNC|WRONLY|RDWR)|flags)\b"
)


def calls(text: str) -> list[str]:
    """The lines that call the system by a path, but for what lies in /proc or /dev, which nobody swaps."""
    code = re.sub(r"//[^\n]*", "", text)
    lines = [code[code.rfind("\n", 0, found.start()) + 1 : found.end()].strip() for found in CALL.finditer(code)]
    rest = [code[found.end() :].split("\n", 1)[0] for found in CALL.finditer(code)]
    return [line for line, after in zip(lines, rest, strict=True) if not re.search('"/(?:proc|dev)/', line + after)]


def test_files_are_changed_by_descriptors_alone() -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PLACES]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = [name for name in names if name.endswith(SUFFIXES) and (ROOT / name).exists()]
    found = {name: calls((ROOT / name).read_text(encoding="utf-8")) for name in sources}
    for place in PLACES:
        assert any(name.startswith(place) for name in sources), place
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found.get(name)] == []


def test_every_way_to_change_a_file_by_its_path_is_known() -> None:
    for line in (
        "::unlink(path.c_str());",
        "if (::rmdir(path) != 0) return;",
        "rmdir(path);",
        "::rename(a, b);",
        "std::rename(a, b);",
        "return std::remove(path);",
        "std::filesystem::remove_all(path, ignored);",
        "for (const auto& entry : std::filesystem::directory_iterator(path)) {",
        'DIR* directory = ::opendir("x");',
        "std::ofstream out(path);",
        "const Fd file(::open(path.c_str(),\n    O_WRONLY | O_CREAT, 0600));",
        "::openat(at, name, O_RDWR);",
        "::open(path, flags, 0600);",
    ):
        assert calls(line), line
    for line in (
        "files.rename(from, to);",
        "int DirAt::rename(const std::string& from) const {",
        "[[nodiscard]] virtual int64_t rename(const std::string& from, const std::string& to) = 0;",
        "::open(path.c_str(), O_RDONLY | O_CLOEXEC);",
        "writer->link(a, b); // ::unlink(a)",
        'std::filesystem::directory_iterator("/proc/self/fd");',
    ):
        assert not calls(line), line
