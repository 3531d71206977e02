"""A damaged or hostile GGUF: one error that names the file, the place and the cause; bounded memory and time."""

from __future__ import annotations

import resource
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifact import gguf_bytes as g
from headrace.artifact.gguf import read_gguf
from headrace.errors import FileError, HeadraceError, UnsupportedError

ROW = struct.pack("<32f", *range(32))


def good() -> bytes:
    infos, data = g.pack_tensors([("a", [32], 0, ROW), ("b", [32, 2], 0, ROW * 2)])
    return g.build([("general.architecture", g.string("llama")), ("n", g.u32(5))], infos, data)


def one_tensor(info: bytes, data: bytes = ROW) -> bytes:
    return g.build([], [info], data)


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not a GGUF": (b"GGML" + b"\0" * 60, "not a GGUF"),
    "only the magic": (b"GGUF", "truncated"),
    "version 1": (g.build([], [], b"", version=1), "version"),
    "array length 2^63": (g.build([("x", g.array(4, 2**63, b""))], [], b"")[:61], "elements do not fit"),
    "string array length 2^63": (g.build([("x", g.array(8, 2**63, b""))], [], b""), "strings do not fit"),
    "string length 2^63": (g.build([], [], b"", num_keys=1)[:24] + struct.pack("<Q", 2**63), "truncated"),
    "key count 2^63": (g.build([], [], b"", num_keys=2**63), "too many"),
    "tensor count 2^63": (g.build([], [], b"", num_tensors=2**63), "too many"),
    "more keys than bytes": (g.build([], [], b"", num_keys=9), "truncated"),
    "nested arrays": (g.build([("x", g.array(9, 1, g.array(9, 1, b"")))], [], b""), "arrays of arrays"),
    "unknown value type": (g.build([("x", g.value(99, b""))], [], b""), "not known"),
    "unknown element type": (g.build([("x", g.array(77, 1, b"\0"))], [], b""), "not known"),
    "bad UTF-8": (g.build([("x", g.value(8, g.text(b"\xff\xfe")))], [], b""), "UTF-8"),
    "key twice": (g.build([("x", g.u32(1)), ("x", g.u32(1))], [], b""), "occurs twice"),
    "alignment 2^30": (g.build([("general.alignment", g.u32(2**30))], [], b""), "power of two"),
    "alignment 0": (g.build([("general.alignment", g.u32(0))], [], b""), "power of two"),
    "alignment as text": (g.build([("general.alignment", g.string("8"))], [], b""), "power of two"),
    "no dimensions": (one_tensor(g.info("a", [], 0, 0)), "dimensions"),
    "n_dims beyond the array": (one_tensor(g.info("a", [32], 0, 0, num_dims=2**31)), "dimensions"),
    "dimension 0": (one_tensor(g.info("a", [0, 4], 0, 0)), "empty or too large"),
    "product that wraps": (one_tensor(g.info("a", [2**32, 2**32], 0, 0)), "empty or too large"),
    "dimension 2^63": (one_tensor(g.info("a", [2**63], 0, 0)), "empty or too large"),
    "past the end": (one_tensor(g.info("a", [64], 0, 0)), "ends at byte"),
    "offset past the end": (one_tensor(g.info("a", [32], 0, 2**40)), "ends at byte"),
    "offset 2^64 - 32": (one_tensor(g.info("a", [32], 0, 2**64 - 32)), "ends at byte"),
    "offset not aligned": (one_tensor(g.info("a", [32], 0, 4), ROW * 2), "multiple of"),
    "overlap": (g.build([], [g.info("a", [32], 0, 0), g.info("b", [32], 0, 32)], ROW * 2), "overlaps"),
    "name twice": (g.build([], [g.info("a", [32], 0, 0), g.info("a", [32], 0, 128)], ROW * 2), "occurs twice"),
    "rows no whole blocks": (one_tensor(g.info("a", [31], 8, 0)), "whole Q8_0 blocks"),
    "over-long": (good() + b"\0" * 64, "belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    raw, cause = CASES[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError) as caught:
        read_gguf(path)
    assert cause in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_unknown_tensor_type_names_what_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(one_tensor(g.info("a", [256], 16, 0), b"\0" * 256))
    with pytest.raises(UnsupportedError, match=r"type 16 is not supported: F32.*Q6_K"):
        read_gguf(path)


@pytest.mark.parametrize("size", range(0, len(good()), 7))
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(good()[:size])
    with pytest.raises(FileError):
        read_gguf(path)


def test_the_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(good())
    file = read_gguf(path)
    assert file.metadata == {"general.architecture": "llama", "n": 5}
    assert file.tensors["b"].data.tolist() == [list(range(32))] * 2


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, len(good()) - 1), st.integers(0, 255)), min_size=1, max_size=8
    )
)
def test_any_flipped_bytes_are_read_or_refused(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    raw = bytearray(good())
    for at, byte in flips:
        raw[at] = byte
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    try:
        read_gguf(path)
    except HeadraceError as error:
        assert error.exit_code == 2


def split(tmp_path: Path, numbers: list[int], count: int = 2) -> Path:
    for i, number in enumerate(numbers):
        infos, data = g.pack_tensors([(f"t{i}", [32], 0, ROW)])
        keys = [
            ("split.no", g.value(2, struct.pack("<H", number))),
            ("split.count", g.value(2, struct.pack("<H", count))),
        ]
        (tmp_path / f"m-{i + 1:05d}-of-{count:05d}.gguf").write_bytes(g.build(keys, infos, data))
    return tmp_path / f"m-00001-of-{count:05d}.gguf"


def test_split_files_are_joined(tmp_path: Path) -> None:
    assert set(read_gguf(split(tmp_path, [0, 1])).tensors) == {"t0", "t1"}


def test_a_missing_or_misnumbered_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"split\.no"):
        read_gguf(split(tmp_path, [0, 0]))
    first = split(tmp_path, [0], count=3)
    with pytest.raises(FileError, match="No such file"):
        read_gguf(first)
    renamed = first.rename(tmp_path / "other.gguf")
    with pytest.raises(FileError, match=r"split\.count"):
        read_gguf(renamed)
