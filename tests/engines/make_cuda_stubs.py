"""Makes stand-ins for the CUDA libraries that PyPI's torch is linked with.

    make_cuda_stubs.py SITE_PACKAGES

PyPI has one torch for Linux, and it needs 3.5 GB of CUDA wheels to be imported, also where there is
no GPU. A stand-in has the names that torch's libraries ask for, each a function that returns 100
(cudaErrorNoDevice), so torch finds no GPU. A path that calls CUDA unasked may still crash: this is
for tests on a CPU. Needs gcc and readelf.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# The system's own; everything else that is missing gets a stand-in.
SYSTEM = re.compile(r"^(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|util)\.so|ld-linux)")
CUDA_NAME = re.compile(r"^(cu[a-zA-Z]|nccl|nvrtc|nvJit|nvshmem|__cuda|cufile)")


def readelf(option, library):
    done = subprocess.run(
        ["readelf", option, "-W", str(library)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def needed_libraries(library):
    return set(re.findall(r"\(NEEDED\).*\[(.*?)\]", "\n".join(readelf("-d", library))))


def version_owners(library):
    """Version name, such as "libcudart.so.13" -> the library that has it."""
    owners, owner = {}, None
    for line in readelf("-V", library):
        if match := re.search(r"File: (\S+)", line):
            owner = match[1]
        elif owner and (match := re.search(r"Name: (\S+)\s+Flags: .*Version: ", line)):
            owners.setdefault(match[1], owner)
    return owners


def symbols(library):
    """(name, version, is it defined here?, may it stay undefined?) of each dynamic symbol."""
    for line in readelf("--dyn-syms", library):
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":"):
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@"), fields[6] != "UND", fields[4] == "WEAK"


def collect(libraries):
    """Missing library -> version ("" = none) -> names that it must have."""
    present = {library.name for library in libraries}
    missing, defined, asked = set(), set(), set()
    for library in libraries:
        needed = needed_libraries(library) - present
        missing |= {name for name in needed if not SYSTEM.match(name)}
        owners = version_owners(library)
        for name, version, is_defined, is_weak in symbols(library):
            if is_defined:
                defined.add(name)
            elif version or not is_weak:
                asked.add((name, version, owners.get(version, "")))
    runtime = next((name for name in sorted(missing) if "cudart" in name), None)
    stubs = {name: collections.defaultdict(set) for name in missing}
    for name, version, owner in asked:
        if owner in stubs:
            stubs[owner][version].add(name)
        elif not version and name not in defined and CUDA_NAME.match(name) and runtime:
            stubs[runtime][""].add(name)
    return stubs


def compile_stub(soname, versions, folder):
    names = sorted(set().union(*versions.values())) if versions else []
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "stub.c")
        functions = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
        source.write_text(functions or "int certkv_empty_stub;\n")
        command = ["gcc", "-w", "-O1", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{soname}"]
        command += [str(source), "-o", str(folder / soname)]
        if any(versions):
            script = pathlib.Path(scratch, "stub.map")
            script.write_text(
                "".join(
                    f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
                    for version, names in versions.items()
                    if version
                )
            )
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main():
    site = pathlib.Path(sys.argv[1])
    torch = site / "torch" / "lib"
    libraries = sorted(torch.glob("*.so*"))
    if not libraries:
        sys.exit(f"{torch} has no libraries; install torch there first")
    # Both are on the search path of torch's libraries, the first in builds for CUDA 13.
    searched = "\n".join(readelf("-d", torch / "libtorch_cuda.so"))
    folder = site / "nvidia" / "cu13" / "lib" if "cu13" in searched else torch
    folder.mkdir(parents=True, exist_ok=True)
    stubs = collect(libraries)
    for soname, versions in sorted(stubs.items()):
        compile_stub(soname, versions, folder)
    print(f"{len(stubs)} stand-ins for CUDA libraries in {folder}")


if __name__ == "__main__":
    main()
