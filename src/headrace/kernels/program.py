"""The program of a model: a flat tuple of operations over named workspace buffers.

A model is compiled into a `Program` once, at load. A backend turns it into a `Runner` that runs any
range of operations over a `Batch`: a layer slice is a range, a whole step is the whole range. Operations
are frozen values; nothing here computes.

Buffers, one row a token of the batch: `X` i32[rows, hidden] (residual), `QKV` i32[rows, q + 2 kv],
`MIXED` i32[rows, q], `GATE_UP` i32[rows, 2 ffn_rows], `LOGITS` i32[logit rows, vocab], `SHARED` i32[rows, hidden]
(output of a shared expert), and one block activation of the width that the last producer wrote (Norm, Quantize,
SiluMul).

Experts are no operands: they lie in `ExpertSlots`, which the caller fills. A run stops after a `Route` whose
experts do not all have a slot, and is resumed there once they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.arith.sampling import Draw, Logits

PAGE_TILES = 4  # a KV page holds 4 tiles of 16 positions
PAGE_TOKENS = 64
MAX_PAIRS = 2048  # (row, chosen expert) pairs of a layer that native kernels hold at once
LOGIT_ROWS = 16  # rows of one pass that may want logits, unless more are asked for

SITES = (
    "embed", "project", "residual", "head_norm", "rope_q", "rope_k", "attention",
    "router", "experts", "shared", "adapter",
)  # fmt: skip


class Buffer(IntEnum):
    X = 0
    QKV = 1
    MIXED = 2
    GATE_UP = 3
    LOGITS = 4
    SHARED = 5


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An affine block weight [n, k] in kernel order (docs/artifact.md): tiles of 16 rows.

    codes u8[T, B, 4 or 8, 16, 4], scales i16[T, G, 16], mins i16[T, ceil(G/4), 16, 4] or None,
    row i32[3, 16 T] (mantissa, exponent, min shift). bits 4 or 8, group 32 or 64.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.int16]
    mins: NDArray[np.int16] | None
    row: NDArray[np.int32]
    n: int
    k: int
    bits: int
    group: int

    @property
    def nbytes(self) -> int:
        mins = 0 if self.mins is None else self.mins.nbytes
        return self.codes.nbytes + self.scales.nbytes + mins + self.row.nbytes


@dataclass(frozen=True)
class FieldSpan:
    """An array inside an expert's record: NumPy type, shape, byte offset."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class WeightSpans:
    """A packed weight [n, k] inside a record; fields codes, scales, mins (maybe), row."""

    fields: Mapping[str, FieldSpan]
    n: int
    k: int
    bits: int
    group: int


@dataclass(frozen=True)
class ExpertLayout:
    """One expert's record of `nbytes`: gate_up [2 ffn_rows, hidden] and down [hidden, ffn_width]."""

    gate_up: WeightSpans
    down: WeightSpans
    nbytes: int


@dataclass(frozen=True, eq=False)
class Gain:
    """A norm's gain i32[k] * 2^exponent and its epsilon mantissa * 2^exponent."""

    values: NDArray[np.int32]
    exponent: int
    eps: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Embed:
    """Tokens of the batch -> X (R10)."""

    weight: PackedWeight


@dataclass(frozen=True, eq=False)
class Norm:
    """X -> activation (R4, R2)."""

    gain: Gain


@dataclass(frozen=True, eq=False)
class Project:
    """Activation -> target (R3), plus a bias, plus what the target held if `residual`."""

    weight: PackedWeight
    target: Buffer
    bias: NDArray[np.int32] | None = None
    residual: bool = False


@dataclass(frozen=True, eq=False)
class Adapt:
    """Behind a Project: rows whose sequence has an adapter get what it adds to `target` (R16).

    layer and name say which weight the Project has: "qkv", "out", "gate_up" or "down".
    """

    layer: int
    name: str
    target: Buffer


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of heads of QKV, in place (R4, R5): `count` norms from head `first_head` on, each over `width` heads."""

    gain: Gain
    first_head: int
    count: int
    width: int = 1


@dataclass(frozen=True, eq=False)
class Land:
    """Rotate the query and key heads of QKV in place and store keys and values (R6, R7)."""

    layer: int


@dataclass(frozen=True, eq=False)
class Attend:
    """Query heads of QKV over the stored keys and values of their sequence -> MIXED (R8)."""

    layer: int


@dataclass(frozen=True, eq=False)
class Quantize:
    """MIXED -> activation (R2)."""


@dataclass(frozen=True, eq=False)
class SiluMul:
    """silu(gate) * up of GATE_UP -> activation (R9, R2). rows: of gate, and where up starts."""

    rows: int


@dataclass(frozen=True, eq=False)
class Select:
    """Keep the rows of X that the batch wants logits of: from here on, they are the rows."""


@dataclass(frozen=True, eq=False)
class Router:
    """A router's rows: value = codes * 2^exponent. codes i16[E (+ 1), hidden], exponents i32[E (+ 1)].

    With a shared expert, the last row is its gate.
    """

    codes: NDArray[np.int16]
    exponents: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Ahead:
    """The router of a later layer, applied early to guess its experts; a guess changes no result."""

    layer: int
    gain: Gain
    router: Router


@dataclass(frozen=True, eq=False)
class Route:
    """X -> the chosen experts of every row and their weights (R12, R13).

    layer: index among all layers. normalise: weights of the chosen sum to one; otherwise they are shares of all
    experts. gate: the router's last row is the gate of a shared expert.
    """

    layer: int
    gain: Gain
    router: Router
    top_k: int
    normalise: bool
    gate: bool = False
    ahead: Ahead | None = None


@dataclass(frozen=True, eq=False)
class Experts:
    """The chosen experts of every row over the activation, each times its weight, added to X (R3, R9, R14)."""

    layer: int
    layout: ExpertLayout


@dataclass(frozen=True, eq=False)
class AddShared:
    """X += SHARED times the sigmoid of the shared expert's gate (R15)."""


Op = (
    Embed | Norm | Project | Adapt | HeadNorm | Land | Attend | Quantize | SiluMul | Select
    | Route | Experts | AddShared
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes that every operation shares. ffn_rows and ffn_width are the widest MLP's, padded as in DecoderConfig."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_rows: int
    ffn_width: int
    vocab: int
    fraction_bits: int
    num_experts: int = 0  # of a layer that has experts, without a shared one
    top_k: int = 0
    expert_rows: int = 0  # ffn_rows and ffn_width of one expert
    expert_width: int = 0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def tile_bytes(self) -> int:
        """One KV tile record: 16 positions of one kv head (src/native/ops.h)."""
        return 32 * self.head_dim + 64 * (self.head_dim // 32) + 64

    @property
    def page_bytes(self) -> int:
        """One KV page: [layers][kv heads][4 tiles][record]."""
        return self.num_layers * self.num_kv_heads * PAGE_TILES * self.tile_bytes


@dataclass(frozen=True, eq=False)
class Program:
    """Operations with the tables they share. `marks[i]` is the index of layer i's first operation;
    the last mark is the first operation after the layers."""

    ops: tuple[Op, ...]
    shape: ModelShape
    rope_low: NDArray[np.int32]
    rope_high: NDArray[np.int32]
    sigmoid: NDArray[np.int32]
    marks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LowRank:
    """A pair of an adapter: rows [offset, offset + b.n) of an Adapt's target get b @ (a @ activation) (R16).

    a [rank, k] and b [n, rank]: symmetric 8 bits in groups of 32, rank a multiple of 32, offset one of 16.
    """

    a: PackedWeight
    b: PackedWeight
    offset: int


# Of an adapter: its pairs by an Adapt's layer and name, each for other rows of the target.
Pairs = Mapping[tuple[int, str], tuple[LowRank, ...]]


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one run. Rows of one sequence are consecutive positions in order.

    tokens, positions, sequences: i32[rows]; page_tables[s] i32[pages] are the KV pages of sequence s;
    logit_rows i32[any]: the rows whose logits are wanted. adapters i32[sequences]: what `Runner.load_adapter` gave for
    each sequence, -1 for none; None where no sequence has one.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    page_tables: tuple[NDArray[np.int32], ...]
    logit_rows: NDArray[np.int32]
    adapters: NDArray[np.int32] | None = None


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Memory for experts, shared with kernels, which read it; whoever fills it owns it.

    memory u8[slots, slot_bytes], page-aligned; table i32[num_layers, E]: the slot of an expert, -1 where it has none;
    state u8[slots]: EMPTY, READING, READY or FAILED; used u8[slots]: counts the uses of a slot, up to 255.
    An expert with a slot may still be READING: kernels then wait for it.
    """

    memory: NDArray[np.uint8]
    table: NDArray[np.int32]
    state: NDArray[np.uint8]
    used: NDArray[np.uint8]


EMPTY, READING, READY, FAILED = range(4)
MAX_TASKS = 256  # of one call of a hook


@dataclass(frozen=True)
class ParallelFor:
    """A host's parallel-for, which computes blocks of rows of a projection on threads of its own.

    run(task_count, task) calls task(index) exactly once for each index in [0, task_count), in any order, from any
    threads at once, and returns when they have returned. Tasks release the GIL while they compute; a thread that calls
    one needs 1 MiB of stack. A task that is called after `run` has returned
    raises ParallelForError and does nothing; one that still computes then is waited for.
    max_tasks: 0 to MAX_TASKS; with 0 or 1, `run` is never called. matvec: also cut the projections of one row.
    """

    run: Callable[[int, Callable[[int], None]], None]
    max_tasks: int
    matvec: bool = False


FORECAST_ROWS = 4  # passes of more rows use most experts anyway


class Runner(Protocol):
    """A compiled program with its workspace; used by one thread at a time."""

    capacity: int

    def run(self, begin: int, end: int, batch: Batch, cache: NDArray[np.uint8]) -> int:
        """Run operations [begin, end) over at most `capacity` rows; cache u8[pages, page_bytes].

        Returns the operation before which it stopped: `end`, or the one after a Route that chose, or with lookahead
        guessed, an expert without a slot. Raises ExpertReadError when an expert that it waits for is FAILED.
        """

    def load_adapter(self, pairs: Pairs) -> int:
        """Make an adapter usable in batches; returns its number. Its arrays are borrowed until it is unloaded.

        Nothing is allocated in a run for it later. Raises InputError for a pair that fits no Adapt of the program.
        """

    def unload_adapter(self, number: int) -> None:
        """Free what `load_adapter` took; the number may be given again."""

    def bind_slots(self, slots: ExpertSlots) -> None:
        """Where experts lie from now on."""

    def routes(self) -> NDArray[np.int32]:
        """Experts that the last Route chose, i32[rows, top_k], the likeliest first."""

    def set_lookahead(self, on: bool) -> None:
        """Whether routes guess ahead, in passes of at most FORECAST_ROWS rows."""

    def set_watched(self, on: bool) -> None:
        """Whether runs stop after every Route."""

    def expert_uses(self) -> int:
        """How many experts, counted once a layer and pass, were used since the runner was made."""

    def foretold(self) -> tuple[int, int]:
        """How many choices of rows had been guessed for since the runner was made, and how many of them rightly."""

    def seconds_waited(self) -> float:
        """Time that kernels waited for experts to be read, of all threads together."""

    def forecast(self) -> NDArray[np.int32]:
        """Experts that the last Route guessed for its `ahead` layer, i32[rows, top_k]; no rows without a guess."""

    def run_experts(
        self, index: int, experts: NDArray[np.int32], slots: NDArray[np.int32], last: bool
    ) -> None:
        """A part of the `Experts` at `index`: these experts alone, from these slots, whatever the table says.

        Parts may come in any order; the sum over all chosen experts is added to X with the `last` one.
        """

    def logits(self, rows: int) -> NDArray[np.int32]:
        """The first `rows` rows of LOGITS, [rows, vocab]; valid until the next run."""

    def residual(self, rows: int) -> NDArray[np.int32]:
        """The first `rows` rows of X, [rows, hidden]; valid until the next run."""

    def put(self, rows: NDArray[np.int32]) -> None:
        """Make i32[rows, hidden] the X of a new pass of 1 to `capacity` rows.

        Runs may follow that begin at a mark, or wherever nothing but X is needed, with a batch of as many rows, whose
        tokens are then not read. So a pass can be paused at a mark by `residual`, before `Select` leaves rows out, and
        go on in another batch, runner, tier and number of threads: what follows depends on each row of X and on its own
        sequence alone. Raises InputError where the shape is another.
        """

    def set_parallel_for(self, hook: ParallelFor | None) -> None:
        """Have a host compute blocks of projections from now on; None ends it.

        Of a runner with one thread alone (InputError otherwise, and for a hook out of bounds). Cut are the projection
        into LOGITS and, with `matvec`, every one-row `Project`, not experts; how is said in
        `kernels.parallel_for.split_rows`: `run` is called only where that gives two blocks or more. Results are the
        same with any hook.

        A run whose hook omits, repeats or invents a task raises ParallelForError once `run` has returned, and whatever
        `run` raises is raised as it is. Then the pass has ended: its counts (`saturations`, `row_saturations`) are as
        before the failed range began, X is not, and KV of the batch's positions is either as before or as the range
        writes it again. The range can be repeated from 0, or from a mark after `put` of what `residual` gave there. A
        hook must not use the runner that calls it (ValueError).
        """

    def saturations(self) -> Mapping[str, int]:
        """How many values were clipped since the runner was made, by site."""

    def row_saturations(self) -> NDArray[np.int64]:
        """Clips of each row of the batch in this pass, i64[rows, len(SITES)]: since `put`, or a run from 0, was called.

        A row keeps its place when `Select` leaves others out. Guesses of `lookahead` are not counted.
        """

    def close(self) -> None:
        """Release threads and memory; the runner is unusable afterwards."""


class Backend(Protocol):
    """One kernel tier."""

    name: str

    def workspace_bytes(
        self, shape: ModelShape, *, max_positions: int, capacity: int, logit_capacity: int
    ) -> int:
        """What `compile` needs of memory, exactly, for a program of this shape and context.

        max_positions: as many as the program's rotary tables hold, or any number that rounds up to it in 256s.
        """

    def compile(
        self,
        program: Program,
        *,
        capacity: int,
        logit_capacity: int,
        memory: NDArray[np.uint8] | None = None,
    ) -> Runner:
        """Bind the program to a workspace.

        memory: u8[workspace_bytes or more], contiguous, at a multiple of 64 bytes, which is zeroed, belongs to the
        runner alone and is kept by it; without it the runner allocates as much. Raises InputError for what is not such.

        In it is everything that depends on the model's sizes, capacity or context: X and the other buffers, quantised
        vectors, scratch of threads, pairs of rows and experts, counts. Outside, and of a size that is settled here: the
        runner with its list of operations, threads and their stacks (up to 1 MiB of each is used). A run allocates
        besides only what its call is made of (a list of page tables, the arrays that it returns, a hook's tasks) and
        frees it. The reference keeps its buffers there too, as int64, but computes in temporary arrays of NumPy.
        """

    def draw(self, logits: Logits, how: Draw, word: int) -> int:
        """The token that the 64-bit random `word` picks from logits [vocab] (R11)."""
