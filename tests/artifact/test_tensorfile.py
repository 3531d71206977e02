"""safetensors files: what the library writes is read, what the writer writes the library reads, lies are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec, read_tensors
from headrace.errors import FileError


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BOMB = b'{"a":' * 4000 + b"1" + b"}" * 4000

CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "five bytes": (b"12345", "only 5 bytes"),
    "header larger than the file": (raw({}, length=2**40), "in a file of"),
    "header length 2^64 - 1": (b"\xff" * 8 + b"{}", "in a file of"),
    "not JSON": (raw(b"hello"), "not valid JSON"),
    "not an object": (raw(b"[]"), "not a JSON object"),
    "nested bomb": (raw(BOMB), "nested deeper"),
    "NaN": (raw(b'{"a":NaN}'), "not valid JSON"),
    "bad UTF-8": (raw(b'{"\xff":1}'), "not valid JSON"),
    "name twice": (raw(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "twice"),
    "unknown dtype": (raw({"a": entry([1], 0, 4, "Q4")}, b"1234"), "not supported"),
    "negative shape": (raw({"a": entry([-1], 0, 4)}, b"1234"), "natural"),
    "bool shape": (raw({"a": entry([True], 0, 4)}, b"1234"), "natural"),
    "reversed offsets": (raw({"a": entry([1], 4, 0)}, b"1234"), "data_offsets"),
    "past the end": (raw({"a": entry([2], 0, 8)}, b"1234"), "data_offsets"),
    "wrong size": (raw({"a": entry([3], 0, 4)}, b"1234"), "offsets span"),
    "product that wraps": (raw({"a": entry([2**62, 4], 0, 0)}), "offsets span"),
    "empty and too large": (raw({"a": entry([2**62, 0], 0, 0)}), "too large"),
    "overlap": (raw({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678"), "overlaps"),
    "gap": (raw({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"123456789abc"), "gap"),
    "over-long": (raw({"a": entry([1], 0, 4)}, b"12345"), "belong to no tensor"),
    "extra field": (raw({"a": {**entry([1], 0, 4), "x": 1}}, b"1234"), "exactly"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    content, cause = CASES[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        read_tensors(path)
    assert cause in caught.value.message
    assert str(path) in caught.value.message


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int16)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    got = read_tensors(tmp_path / "x.safetensors")
    assert {k: v.data.tolist() for k, v in got.items()} == {
        k: v.tolist() for k, v in arrays.items()
    }


def test_the_library_reads_what_is_written_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    a = np.arange(12, dtype=np.int32).reshape(4, 3)
    with path.open("wb") as file:
        writer = TensorFileWriter(
            file, [TensorSpec("a", "I32", (4, 3)), TensorSpec("b", "U8", (3,))]
        )
        writer.write("b", np.array([7, 8, 9], np.uint8))
        writer.write("a", a[2:], skip=24)
        writer.write("a", a[:2])
    got = load_file(path)
    assert np.array_equal(got["a"], a)
    assert got["b"].tolist() == [7, 8, 9]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    try:
        read_tensors(path)
    except FileError as error:
        assert str(path) in error.message
