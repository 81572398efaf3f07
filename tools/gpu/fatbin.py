"""Makes a library with GPU code small: code for one architecture is kept, and nothing that only debuggers or device linkers read.

What is left out becomes zeros, which compress to nothing; all else stays where it was. A section `.nv_fatbin` holds containers, each a
header and entries: machine code or PTX for one architecture.
"""

import struct
from pathlib import Path

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, flags, bytes of this header, bytes of the code
ARCHITECTURE = 28  # where an entry's header has it
# Sections of relocatable device code, and of debuggers.
UNUSED = ("__nv_relfatbin", ".debug_")


def keep_architecture(library: Path, to: Path, architecture: int) -> None:
    """Writes the smaller library, a shared object of 64 bits."""
    data = bytearray(library.read_bytes())
    kept = 0
    for name, offset, size in sections(data):
        if name.startswith(UNUSED):
            data[offset:offset + size] = bytes(size)
        elif name == ".nv_fatbin":
            kept += slim(data, offset, size, architecture)
    if not kept:
        raise SystemExit(f"{library.name} has no code for architecture {architecture}")
    to.write_bytes(data)


def sections(data: bytearray) -> list:
    """Name, offset and size of each section that takes room in the file."""
    start, = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * entry_size) for i in range(count)]
    texts = headers[names][4]
    no_bits = 8
    return [(data[texts + name:data.index(0, texts + name)].decode(), offset, size)
            for name, kind, _, _, offset, size in headers if kind != no_bits]


def slim(data: bytearray, offset: int, size: int, architecture: int) -> int:
    """Leaves entries for the architecture in each container that has one. Returns the bytes that are left."""
    kept, at, end = 0, offset, offset + size
    while at + CONTAINER.size <= end:
        magic, version, header, length = CONTAINER.unpack_from(data, at)
        if magic != MAGIC:
            at += 8  # between containers
            continue
        entries, entry, stop = [], at + header, at + header + length
        while entry < stop:
            _, _, own, code = ENTRY.unpack_from(data, entry)
            found, = struct.unpack_from("<I", data, entry + ARCHITECTURE)
            if found == architecture:
                entries.append(bytes(data[entry:entry + own + code]))
            entry += own + code
        left = b"".join(entries)
        if left:
            data[at + header:stop] = left + bytes(length - len(left))
            CONTAINER.pack_into(data, at, magic, version, header, len(left))
            kept += len(left)
        at = stop
    return kept
