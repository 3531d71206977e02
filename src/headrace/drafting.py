"""Where the drafts of a loaded model come from: the text itself, a head of the model's own, or a smaller model."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.artifact.container import TOKENIZER_NAME, Artifact
from headrace.artifact.head import read_head
from headrace.engine.draft_model import DraftModelError, ModelDrafter
from headrace.engine.engine import Engine
from headrace.engine.mtp import MtpDrafter, MtpHead
from headrace.engine.speculate import Drafter, Lookup, Speculate, depth_of
from headrace.errors import SettingError, UnsupportedError
from headrace.kernels.select import select
from headrace.memory.facts import DRAFT_ROWS
from headrace.text.tokenizer import Tokenizer

Draft = Literal["auto", "lookup", "mtp", "model"]

DEFAULT_DRAFT: Draft = "auto"


class Drafting:
    """The drafters of one model; makes new ones for every generation."""

    def __init__(
        self, artifact: Artifact, engine: Engine, draft: Draft, model: Engine | None = None
    ) -> None:
        """model: the draft model's engine, which is closed with this. Raises UnsupportedError where `draft` is the
        model's own head, and there is none; FileError for one that cannot be used."""
        self._engine = engine
        self._draft = draft
        self._model = model
        self._head: MtpHead | None = None
        if draft == "mtp" or (draft == "auto" and model is None):
            self._head = self._opened(artifact)

    def _opened(self, artifact: Artifact) -> MtpHead | None:
        found, engine = read_head(artifact), self._engine
        if found is not None:
            # On a thread of its own: idle threads of two runners would take turns to be in each other's way.
            backend = select(engine.backend.name, threads=1)
            return MtpHead(found, backend, engine.fraction_bits, engine.context)
        if self._draft == "mtp":
            raise UnsupportedError(
                f"{artifact.path} has no head that drafts",
                hint="draft by lookup, or with a draft model",
            )
        return None

    def drafters(self, speculate: Speculate) -> list[Drafter]:
        """For one generation, in the order in which they are asked; none where nothing is drafted."""
        if depth_of(speculate) == 0:
            return []
        found: list[Drafter] = []
        if self._draft in ("auto", "lookup"):
            found.append(Lookup(self._engine.context))
        if self._head is not None:
            found.append(MtpDrafter(self._head))
        if self._model is not None:
            found.append(ModelDrafter(self._model))
        return found

    def close(self) -> None:
        if self._head is not None:
            self._head.close()
        if self._model is not None:
            self._model.close()


def check_draft(draft: Draft, with_model: bool) -> None:
    """Refuse a choice that is none, or that leaves a draft model idle. Raises SettingError."""
    if draft not in get_args(Draft):
        raise SettingError(
            f"draft is {draft!r:.60}; it must be one of {', '.join(get_args(Draft))}"
        )
    if draft == "model" and not with_model:
        raise SettingError(
            "draft is model, but there is no draft model", hint="name one: draft_model"
        )
    if with_model and draft not in ("auto", "model"):
        raise SettingError(f"a draft model has no effect where draft is {draft}")


def draft_engine(
    artifact: Artifact, context: int, *, threads: int | None, kernels: str | None
) -> Engine:
    """The engine of a draft model beside a model with that context, as the plan counts it."""
    return Engine(
        artifact,
        threads=threads,
        kernels=kernels,
        max_context=min(context, artifact.manifest.config["context"]),
        chunk=DRAFT_ROWS,
        logit_rows=1,
    )


def check_vocabulary(model: Artifact, tokenizer: Tokenizer, draft: Artifact) -> None:
    """The draft model's tokens are the model's. Raises DraftModelError, which names the first difference."""
    sizes = [a.manifest.config["vocab_size"] for a in (model, draft)]
    if sizes[0] != sizes[1]:
        raise DraftModelError(
            f"the draft model {draft.path} has a vocabulary of {sizes[1]:,}, the model one of {sizes[0]:,}"
        )
    if same_tokenizer(model, draft):
        return
    other = Tokenizer.from_file(draft.tokenizer_path)
    for token in range(sizes[0]):
        ours, theirs = ((t.token_bytes(token), t.is_special(token)) for t in (tokenizer, other))
        if ours != theirs:
            raise DraftModelError(
                f"token {token} of the draft model {draft.path} is {_named(*theirs)}, of the model {_named(*ours)}"
            )


def same_tokenizer(model: Artifact, draft: Artifact) -> bool:
    """Whether both have the same file."""
    files = [a.manifest.files[TOKENIZER_NAME].sha256 for a in (model, draft)]
    return files[0] == files[1]


def _named(data: bytes, special: bool) -> str:
    return f"{'the control token ' if special else ''}{data!r:.60}"
