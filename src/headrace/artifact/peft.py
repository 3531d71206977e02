"""A PEFT folder with a LoRA adapter as a source: adapter_config.json and adapter_model.safetensors.

Both are untrusted. What is not the plain method on the projections of a decoder's layers is refused by name: it would
run slightly wrong otherwise. https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.adapter_places import MODULES
from headrace.artifact.blocks import floats
from headrace.artifact.jsontext import read_object
from headrace.artifact.tensorfile import StoredTensor, read_tensors
from headrace.errors import AdapterShapeError, FileError, UnsupportedError
from headrace.kernels.adapters import MAX_RANK

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_ALPHA = 1 << 20

_SHORT = {name: module for module, name in MODULES.items()}
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?layers\.(?P<layer>0|[1-9]\d{0,3})\.(?P<module>\w+\.\w+)"
    r"\.lora_(?P<side>[AB])(?:\.(?P<adapter>\w{1,80}))?\.weight"
)
# Parts of names of tensors that are known, and what has them.
_NAMED = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding": "an adapter of the embedding",
    "embed_tokens": "an adapter of the embedding",
    "lm_head": "an adapter of the head",
    "shared_expert": "an adapter of a shared expert",
    "experts": "an adapter of experts",
    "block_sparse_moe": "an adapter of experts or of their router",
    "mlp.gate.": "an adapter of a router",
    "modules_to_save": "a module that was trained as a whole",
    "norm": "a norm that was trained",
    "bias": "a bias that was trained",
}
# Keys that say how the adapter was made, or are read here.
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
_PLAIN_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # of init_lora_weights
_PATTERN = re.compile(r"\^?[\w.]{1,200}\$?")
_EXCLUDED = re.compile(r"(?:\.\*)?[\w.]{1,200}(?:\.\*)?")  # expressions that take no time to match


@dataclass(frozen=True, eq=False)
class PeftPair:
    """One adapted module: what it adds is scale * b @ (a @ x), with a [rank, k] and b [n, rank] as stored."""

    layer: int
    module: str
    rank: int
    alpha: float
    scale: float
    a: StoredTensor
    b: StoredTensor
    a_name: str
    b_name: str


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """A PEFT folder, read: pairs in order of layers and modules."""

    path: Path
    pairs: tuple[PeftPair, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.path / CONFIG_NAME, self.path / WEIGHTS_NAME


def is_peft(path: Path) -> bool:
    """Whether a path looks like a PEFT folder."""
    return (path / CONFIG_NAME).is_file()


def read_peft(path: Path) -> PeftAdapter:
    """Read and check a PEFT folder. Raises FileError, UnsupportedError or AdapterShapeError."""
    config = _Config(path / CONFIG_NAME, read_object(path / CONFIG_NAME))
    config.check()
    file = path / WEIGHTS_NAME
    if not file.exists() and any(path.glob("adapter_model*.bin")):
        raise UnsupportedError(
            f"{path}: an adapter in a pickle (.bin) is not read",
            hint="save it with safe_serialization=True",
        )
    return PeftAdapter(path, tuple(_pairs(file, read_tensors(file), config)))


def values(path: Path, name: str, tensor: StoredTensor) -> NDArray[np.float64]:
    """A tensor of a pair as float64 [n, k]. Raises FileError."""
    out = floats(tensor.dtype, tensor.data)
    if not np.isfinite(out).all():
        raise FileError(path, f"tensor {name!r}", "holds a value that is not finite")
    return out


Sides = dict[str, tuple[str, StoredTensor]]  # "A" and "B", each with its name


def _pairs(file: Path, tensors: Mapping[str, StoredTensor], config: _Config) -> list[PeftPair]:
    found: dict[tuple[int, str], Sides] = {}
    names: set[str | None] = set()
    for name, tensor in tensors.items():
        layer, module, side, adapter = _parsed(file, name)
        names.add(adapter)
        sides = found.setdefault((layer, module), {})
        if side in sides:
            raise FileError(
                file, f"tensor {name!r:.120}", f"is there twice: {sides[side][0]!r:.120}"
            )
        sides[side] = name, tensor
    if not found:
        raise FileError(file, "tensors", "there are none: this adapter changes nothing")
    if len(names) > 1:
        raise UnsupportedError(f"{file}: holds several adapters: {sorted(map(str, names))!r:.120}")
    order = {module: i for i, module in enumerate(MODULES)}
    keys = sorted(found, key=lambda key: (key[0], order[key[1]]))
    pairs = [_pair(file, *key, found[key], config) for key in keys]
    config.check_modules([(pair.layer, _module_name(pair.layer, pair.module)) for pair in pairs])
    return pairs


def _parsed(file: Path, name: str) -> tuple[int, str, str, str | None]:
    """Layer, module, side and adapter of a tensor's name."""
    match = _KEY.fullmatch(name)
    if match and match["module"] in _SHORT:
        return int(match["layer"]), _SHORT[match["module"]], match["side"], match["adapter"]
    what = next((what for part, what in _NAMED.items() if part in name), None)
    known = ", ".join(MODULES.values())
    cause = "is not understood" if what is None else f"is {what}, which is not supported"
    raise UnsupportedError(f"{file}: tensor {name!r:.160} {cause}; an adapter changes {known}")


def _pair(file: Path, layer: int, module: str, sides: Sides, config: _Config) -> PeftPair:
    if len(sides) == 1:
        ((side, (name, _)),) = sides.items()
        raise FileError(file, f"tensor {name!r:.120}", f"has no lora_{'B' if side == 'A' else 'A'}")
    (a_name, a), (b_name, b) = sides["A"], sides["B"]
    for name, tensor in sides.values():
        if tensor.data.ndim != 2 or tensor.dtype not in ("F64", "F32", "F16", "BF16"):
            raise AdapterShapeError(
                file,
                f"tensor {name!r:.120}",
                f"{tensor.dtype}{list(tensor.data.shape)} is no matrix of floats",
            )
    rank, alpha = config.rank(layer, module), config.alpha(layer, module)
    if a.data.shape[0] != rank or b.data.shape[1] != rank:
        name, shape = (a_name, a.data.shape) if a.data.shape[0] != rank else (b_name, b.data.shape)
        cause = f"is {list(shape)}, but its rank is {rank}"
        raise AdapterShapeError(file, f"tensor {name!r:.120}", cause)
    scale = _scale(alpha, rank, config.rank_stabilised)
    return PeftPair(layer, module, rank, alpha, scale, a, b, a_name, b_name)


def _scale(alpha: float, rank: int, stabilised: bool) -> float:
    """alpha / rank, or by its square root: the nearest double, the same on every machine."""
    if not stabilised:
        return float(Fraction(alpha) / rank)
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(alpha) / Decimal(rank).sqrt())


def _module_name(layer: int, module: str) -> str:
    """As the base has it."""
    return f"model.layers.{layer}.{MODULES[module]}"


def _is_named(pattern: str, name: str) -> bool:
    """Whether a pattern is the end of a module's name, or with ^ all of it."""
    ending = pattern.removesuffix("$")
    whole_name = ending.startswith("^")
    return f".{name}".endswith(f".{ending}") or (whole_name and ending[1:] == name)


class _Config:
    """adapter_config.json, key by key; every refusal names the key."""

    def __init__(self, path: Path, body: Mapping[str, Any]) -> None:
        self._path = path
        self._body = body

    @property
    def rank_stabilised(self) -> bool:
        return self._body.get("use_rslora") is True

    def check(self) -> None:
        body = self._body
        if body.get("peft_type") != "LORA":
            raise self._unsupported("peft_type", "LORA")
        if body.get("bias", "none") != "none":
            raise self._unsupported("bias", "none")
        start = body.get("init_lora_weights")
        if not isinstance(start, bool | str | None) or start not in _PLAIN_BASE:
            raise self._unsupported("init_lora_weights", "one that leaves the base as it is")
        for key, value in body.items():
            if key not in _HARMLESS and value not in (None, False, [], {}):
                raise self._unsupported(key, "none")
        if type(body.get("use_rslora", False)) is not bool:
            raise self._unsupported("use_rslora", "true or false")
        self._number("r", body.get("r"), whole=True)
        self._number("lora_alpha", body.get("lora_alpha"), whole=False)

    def check_modules(self, modules: list[tuple[int, str]]) -> None:
        """Refuse what says something else than the tensors, which adapt these layers and modules."""
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in self._body.get(key) or {}:
                if not any(_is_named(pattern, name) for _, name in modules):
                    raise UnsupportedError(
                        f"{self._path}: {key}: {pattern!r:.120} names no module that has tensors"
                    )
        layers = self._body.get("layers_to_transform")
        wanted = [layers] if type(layers) is int else layers
        if wanted is not None and not (
            isinstance(wanted, list) and all(type(n) is int for n in wanted)
        ):
            raise self._unsupported("layers_to_transform", "numbers of layers")
        for layer, name in modules:
            if wanted and layer not in wanted:
                raise self._unsupported("layers_to_transform", f"there are tensors of {name}")
            if self._excludes(name):
                raise self._unsupported("exclude_modules", f"there are tensors of {name}")

    def _excludes(self, name: str) -> bool:
        """A list holds ends of names, a text is a regular expression of the whole name."""
        given = self._body.get("exclude_modules") or []
        if isinstance(given, str) and _EXCLUDED.fullmatch(given):
            return re.fullmatch(given, name) is not None
        if not isinstance(given, list) or not all(isinstance(end, str) for end in given):
            raise self._unsupported("exclude_modules", "names of modules are")
        return any(f".{name}".endswith(f".{end}") for end in given)

    def rank(self, layer: int, module: str) -> int:
        return int(self._chosen("rank_pattern", "r", layer, module, whole=True))

    def alpha(self, layer: int, module: str) -> float:
        return self._chosen("alpha_pattern", "lora_alpha", layer, module, whole=False)

    def _chosen(self, patterns: str, key: str, layer: int, module: str, *, whole: bool) -> float:
        """The first pattern that is the end of the module's name, else the key that is for all."""
        name = _module_name(layer, module)
        given = self._body.get(patterns) or {}
        if not isinstance(given, dict):
            raise self._unsupported(patterns, "an object")
        for pattern, value in given.items():
            if _PATTERN.fullmatch(pattern) is None:
                raise UnsupportedError(
                    f"{self._path}: {patterns}: {pattern!r:.120} is not supported: names of modules are"
                )
            if _is_named(pattern, name):
                return self._number(f"{patterns}.{pattern}", value, whole=whole)
        return self._number(key, self._body.get(key), whole=whole)

    def _number(self, key: str, value: object, *, whole: bool) -> float:
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not isinstance(value, int | float):
            raise FileError(self._path, key, f"{value!r:.60} is not a {'whole ' * whole}number")
        if whole and not 1 <= value <= MAX_RANK:
            raise FileError(self._path, key, f"{value} is not between 1 and {MAX_RANK}")
        if not isfinite(value) or abs(value) > MAX_ALPHA:
            raise FileError(self._path, key, f"{value!r:.60} is not within {MAX_ALPHA:,}")
        return value

    def _unsupported(self, key: str, wanted: str) -> UnsupportedError:
        given = self._body.get(key)
        return UnsupportedError(f"{self._path}: {key} {given!r:.80} is not supported: {wanted}")
