"""What libcertkv promises to programs that are already compiled, as text.

`python3 tests/deploy/c_abi.py build/release/lib/libcertkv.so.1` prints it; clients/c/libcertkv.abi
is the committed one. Lines may be added to that, never changed or taken out, while the library's
name stays.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

HEADER = pathlib.Path(__file__).resolve().parents[2] / "clients/c/certkv.h"


def declarations():
    """Functions by name, structs with their fields, and enumerators, of the header."""
    text = re.sub(r"//[^\n]*|#[^\n]*", "", HEADER.read_text())
    functions, structs, enumerators = {}, {}, []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL):
        structs[name] = re.findall(r"(\w+)(?:\[\d+\])?;", body)
    for body in re.findall(r"typedef enum \w+ \{(.*?)\} \w+;", text, re.DOTALL):
        enumerators += re.findall(r"(\w+) = \d+", body)
    text = re.sub(r"typedef[^;{]*\{.*?\}[^;]*;", "", text, flags=re.DOTALL)
    for statement in text.split(";"):
        words = " ".join(statement.replace('extern "C" {', "").split())
        match = re.search(r"(\w+)\(", words)
        if match:
            functions[match[1]] = words
    return functions, structs, enumerators


def layout(structs, enumerators):
    """Sizes and offsets, as the C compiler has them."""
    lines = ["#include <certkv/certkv.h>", "#include <stdio.h>", "int main(void) {"]
    for name, fields in structs.items():
        lines.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        for field in fields:
            lines.append(f'printf("  {field} %zu %zu\\n", offsetof({name}, {field}), '
                         f"sizeof((({name}*)0)->{field}));")
    lines += [f'printf("enum {name} %d\\n", {name});' for name in enumerators]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "certkv").symlink_to(HEADER.parent)
        (path / "layout.c").write_text("\n".join(lines + ["return 0; }", ""]))
        subprocess.run(["cc", "-std=c11", f"-I{path}", path / "layout.c", "-o", path / "layout"],
                       check=True)
        return subprocess.run([path / "layout"], check=True, capture_output=True, text=True).stdout


def exported(library):
    """Symbols that the library defines, with their versions."""
    out = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", library],
                         check=True, capture_output=True, text=True).stdout
    symbols = [line.split() for line in out.splitlines()]
    return sorted(name for _, kind, name in symbols if kind != "A")


def abi(library):
    functions, structs, enumerators = declarations()
    soname = re.search(r"SONAME.*\[(.*)\]", subprocess.run(
        ["readelf", "-d", library], check=True, capture_output=True, text=True).stdout)[1]
    lines = [f"library {soname}"]
    lines += [f"symbol {symbol}" for symbol in exported(library)]
    lines += [f"function {words}" for _, words in sorted(functions.items())]
    return "\n".join(lines) + "\n" + layout(structs, enumerators)


if __name__ == "__main__":
    print(abi(sys.argv[1]), end="")
