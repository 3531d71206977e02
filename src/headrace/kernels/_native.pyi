"""Types of the native module, whose source is src/native/bind.cpp. Arrays are C-contiguous and borrowed.

`tests/kernels/test_stub.py` compares this file with the module that was built.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I8: TypeAlias = NDArray[np.int8]
U8: TypeAlias = NDArray[np.uint8]
I16: TypeAlias = NDArray[np.int16]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

def tiers() -> list[tuple[str, bool, str]]: ...
def workspace_bytes(
    threads: int,
    sizes: Sequence[int],
    max_positions: int,
    capacity: int,
    logit_capacity: int,
    max_pairs: int,
    /,
) -> int: ...

class Task:
    def __call__(self, index: object | None) -> bool: ...

class Runner:
    def __init__(
        self,
        tier: str,
        threads: int,
        sizes: Sequence[int],
        rope_low: I32,
        rope_high: I32,
        sigmoid: I32,
        exp2_high: I32,
        exp2_low: I32,
        attention_scale: tuple[int, int],
        capacity: int,
        logit_capacity: int,
        max_pairs: int,
        memory: U8 | None,
        /,
    ) -> None: ...
    def embed(
        self,
        codes: U8,
        scales: I16,
        mins: I16 | None,
        row: I32,
        n: int,
        k: int,
        bits: int,
        group: int,
    ) -> None: ...
    def project(
        self,
        codes: U8,
        scales: I16,
        mins: I16 | None,
        row: I32,
        n: int,
        k: int,
        bits: int,
        group: int,
        target: int,
        bias: I32 | None,
        residual: bool,
    ) -> None: ...
    def norm(self, gain: I32, exponent: int, eps: tuple[int, int], /) -> None: ...
    def head_norm(
        self, gain: I32, exponent: int, eps: tuple[int, int], first: int, count: int, width: int, /
    ) -> None: ...
    def land(self, layer: int, /) -> None: ...
    def attend(self, layer: int, /) -> None: ...
    def quantize(self) -> None: ...
    def silu_mul(self, rows: int, /) -> None: ...
    def select(self) -> None: ...
    def adapt(self, target: int, /) -> None: ...
    def load_adapter(
        self,
        pairs: Sequence[
            tuple[int, int, tuple[U8, I16, I32, int, int], tuple[U8, I16, I32, int, int]]
        ],
        /,
    ) -> int: ...
    def unload_adapter(self, number: int, /) -> None: ...
    def route(
        self,
        layer: int,
        gain: I32,
        exponent: int,
        eps: tuple[int, int],
        codes: I16,
        exponents: I32,
        normalise: bool,
        gate: bool,
        /,
    ) -> None: ...
    def route_ahead(
        self,
        layer: int,
        gain: I32,
        exponent: int,
        eps: tuple[int, int],
        codes: I16,
        exponents: I32,
        /,
    ) -> None: ...
    def experts(
        self, layer: int, gate_up: Sequence[int], down: Sequence[int], nbytes: int, /
    ) -> None: ...
    def add_shared(self) -> None: ...
    def num_ops(self) -> int: ...
    def bind_slots(self, memory: U8, table: I32, state: U8, used: U8, /) -> None: ...
    def routes(self) -> I32: ...
    def set_lookahead(self, on: bool, /) -> None: ...
    def set_watched(self, on: bool, /) -> None: ...
    def expert_uses(self) -> int: ...
    def foretold(self) -> tuple[int, int]: ...
    def forecast(self) -> I32: ...
    def run_experts(self, begin: int, experts: I32, slots: I32, last: bool, /) -> None: ...
    def failure(self) -> tuple[int, int] | None: ...
    def expert_bytes(self) -> int: ...
    def waited(self) -> int: ...
    def run(
        self,
        begin: int,
        end: int,
        tokens: I32,
        positions: I32,
        sequences: I32,
        page_tables: Sequence[I32],
        logit_rows: I32,
        cache: U8,
        adapters: I32 | None,
        hook: Callable | None,  # type: ignore[type-arg]
        /,
    ) -> int: ...
    def logits(self) -> I32: ...
    def residual(self) -> I32: ...
    def clipped(self) -> list[int]: ...
    def set_parallel_for(self, max_tasks: int, matvec: bool, /) -> None: ...
    def hook_failure(self) -> str: ...
    def put(self, x: I32, /) -> None: ...
    def pass_rows(self) -> int: ...
    def row_clipped(self, out: I64, /) -> None: ...

class Lanes:
    def __init__(
        self, memory: U8, state: U8, num_lanes: int, piece_bytes: int, retries: int
    ) -> None: ...
    def submit(
        self,
        fd: int,
        nbytes: int,
        reads: Sequence[tuple[int, Sequence[int]]],
        drop: bool,
        prefetch: bool,
        /,
    ) -> None: ...
    def promote(self, slot: int, /) -> None: ...
    def cancel(self, slot: int, /) -> bool: ...
    def wait(self, slot: int, /) -> int: ...
    def drain(self) -> None: ...
    def failure(self, slot: int, /) -> tuple[int, int]: ...
    def bytes_read(self) -> int: ...
    def nanoseconds_waited(self) -> int: ...
    def pending(self) -> int: ...
    def close(self) -> None: ...

def draw_i32(
    logits: I32,
    how: tuple[int, int, int, int, int, int],
    exp2_high: I32,
    exp2_low: I32,
    word: int,
    /,
) -> int: ...
def draw_i64(
    logits: I64,
    how: tuple[int, int, int, int, int, int],
    exp2_high: I32,
    exp2_low: I32,
    word: int,
    /,
) -> int: ...

# Single operations, for tests. x_codes, x_scales, x_sums, x_rounded, x_exponent: a quantised vector, which
# all but op_project write.

def op_quantize(
    tier: str,
    x: I64,
    exponent: int,
    x_codes: I8,
    x_scales: I16,
    x_sums: I16,
    x_rounded: I16,
    x_exponent: I32,
    /,
) -> None: ...
def op_quantize_i32(
    tier: str,
    x: I32,
    exponent: int,
    x_codes: I8,
    x_scales: I16,
    x_sums: I16,
    x_rounded: I16,
    x_exponent: I32,
    /,
) -> None: ...
def op_project(
    tier: str,
    codes: U8,
    scales: I16,
    mins: I16 | None,
    row: I32,
    n: int,
    k: int,
    bits: int,
    group: int,
    x_codes: I8,
    x_scales: I16,
    x_sums: I16,
    x_rounded: I16,
    x_exponent: I32,
    first_tile: int,
    last_tile: int,
    bias: I32 | None,
    residual: bool,
    y: I32,
    fraction_bits: int,
) -> list[int]: ...
def op_norm(
    tier: str,
    x: I32,
    gain: I32,
    gain_exponent: int,
    eps: tuple[int, int],
    fraction_bits: int,
    x_codes: I8,
    x_scales: I16,
    x_sums: I16,
    x_rounded: I16,
    x_exponent: I32,
    /,
) -> None: ...
def op_head_norm(
    tier: str,
    x: I32,
    gain: I32,
    gain_exponent: int,
    eps: tuple[int, int],
    fraction_bits: int,
    /,
) -> int: ...
def op_rope(tier: str, x: I32, low: I32, high: I32, position: int, /) -> int: ...
def op_land(
    tier: str, tile: U8, slot: int, key: I32, value: I32, fraction_bits: int, /
) -> None: ...
def op_attend(
    tier: str,
    tiles: U8,
    q: I32,
    visible: I32,
    scale: tuple[int, int],
    fraction_bits: int,
    out: I32,
    /,
) -> list[int]: ...
def op_silu_mul(
    tier: str,
    gate: I32,
    up: I32,
    table: I32,
    fraction_bits: int,
    x_codes: I8,
    x_scales: I16,
    x_sums: I16,
    x_rounded: I16,
    x_exponent: I32,
    /,
) -> None: ...
def op_mix(tier: str, x: I32, outputs: I32, shares: I32, /) -> int: ...
def op_mix_groups(
    tier: str, x: I32, outputs: I32, shares: I32, counts: Sequence[int], /
) -> int: ...
def op_embed(
    tier: str,
    codes: U8,
    scales: I16,
    mins: I16 | None,
    row: I32,
    n: int,
    k: int,
    bits: int,
    group: int,
    token: int,
    fraction_bits: int,
    out: I32,
) -> int: ...
