"""How tokens are picked where a client does not say, by kind of request; and its values brought into range."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headrace.serve.request import Request, Sampling
from headrace.values import SamplingParams

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Profile:
    """Defaults of one kind of request."""

    temperature: float
    top_p: float
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


CHAT = Profile(temperature=0.7, top_p=0.8, presence_penalty=1.5)
THINKING = Profile(temperature=1.0, top_p=0.95)
TOOLS = Profile(temperature=0.2, top_p=0.9)  # repeats the grammar of calls, so nothing is penalised
STRICT = Profile(temperature=0.7, top_p=0.8)  # repeats quotes and braces

_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


def profile(request: Request) -> Profile:
    """The defaults of a request's kind."""
    if request.tools and request.choice.mode != "none":
        return TOOLS
    if request.effort is not None:
        return THINKING
    return CHAT if request.answer.kind == "text" else STRICT


def sampling_params(request: Request, max_tokens: int) -> SamplingParams:
    """What the engine gets: the client's values, cut to their ranges, over the defaults."""
    chosen: Sampling = request.sampling
    values = {f.name: getattr(profile(request), f.name) for f in fields(Profile)}
    for name, (low, high) in _BOUNDS.items():
        given = getattr(chosen, name)
        if given is not None and not (isinstance(given, float) and math.isnan(given)):
            values[name] = min(max(given, low), high)
    seed = None if chosen.seed is None else chosen.seed % (MAX_SEED + 1)
    return SamplingParams(**values, seed=seed, max_tokens=max_tokens)
