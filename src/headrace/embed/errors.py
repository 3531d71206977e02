"""Why a call of the frame-loop API was refused: a class for each cause, with a stable code, in five groups and one.

The groups: what was given (ArgumentRefused), what a file or blob holds (ContentRefused), the state that an object is in
(LifecycleRefused), what cannot be computed (DomainRefused), schemas (SchemaRefused), and the process's own memory.
"""

from __future__ import annotations

from headrace.errors import InputError


class EmbedError(InputError):
    """A refusal. `consumed`: tokens of a prefill that were read for good before it; nothing else has changed."""

    code = "embed_refused"

    def __init__(self, message: str, *, consumed: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.consumed = consumed


# What was given -----------------------------------------------------------------------------------


class ArgumentRefused(EmbedError):
    """An argument, a buffer or a hook cannot be used."""

    code = "argument_refused"


class InvalidArgumentError(ArgumentRefused):
    """A value of the wrong type or out of its range."""

    code = "invalid_argument"


class BufferTooSmallError(ArgumentRefused):
    """A caller's buffer is smaller than what was asked for needs."""

    code = "buffer_too_small"

    def __init__(self, what: str, needed_bytes: int, given_bytes: int) -> None:
        super().__init__(f"{what} needs {needed_bytes:,} bytes, the buffer has {given_bytes:,}")
        self.needed_bytes = needed_bytes
        self.given_bytes = given_bytes


class MisalignedBufferError(ArgumentRefused):
    """A caller's buffer does not begin at a multiple of 64 bytes."""

    code = "misaligned_buffer"


class LayerBudgetError(ArgumentRefused):
    """A layer budget below one makes no progress."""

    code = "layer_budget_too_small"


class ParallelForInvalidError(ArgumentRefused):
    """A hook that cannot be installed."""

    code = "parallel_for_invalid"


class ParallelForIncompleteError(ArgumentRefused):
    """A hook left out, repeated or invented a task; no token was made, and the call can be repeated."""

    code = "parallel_for_incomplete"


# What a file or a blob holds ----------------------------------------------------------------------


class ContentRefused(EmbedError):
    """What was read is not what it should be."""

    code = "content_refused"


class ArtifactRejectedError(ContentRefused):
    """A model or an adapter that cannot be opened."""

    code = "artifact_rejected"


class AdapterBaseError(ContentRefused):
    """An adapter that was made for another model."""

    code = "adapter_base_mismatch"


class AdapterShapeError(ContentRefused):
    """An adapter whose sizes are not those of the model."""

    code = "adapter_shape_mismatch"


class RestoreModelError(ContentRefused):
    """A blob of another model."""

    code = "restore_model_mismatch"


class RestoreShapeError(ContentRefused):
    """A blob of another KV shape, or of more positions than the context has."""

    code = "restore_shape_mismatch"


class RestoreVersionError(ContentRefused):
    """A blob of another version of the format or of the arithmetic."""

    code = "restore_version_mismatch"


class RestoreTruncatedError(ContentRefused):
    """A blob whose end is missing."""

    code = "restore_truncated"


class RestoreDamagedError(ContentRefused):
    """A blob whose bytes are not those that were written."""

    code = "restore_damaged"


class RestoreAdapterError(ContentRefused):
    """A blob of a sequence with an adapter that was not given, or another one."""

    code = "restore_adapter_mismatch"


# The state that an object is in -------------------------------------------------------------------


class LifecycleRefused(EmbedError):
    """The object is not in a state for this call."""

    code = "lifecycle_refused"


class ModelHasSequencesError(LifecycleRefused):
    """A model cannot be unmapped while sequences live."""

    code = "model_has_live_sequences"


class ModelHasPrefixesError(LifecycleRefused):
    """A model cannot be unmapped while prefixes live."""

    code = "model_has_live_prefixes"


class ModelHasAdaptersError(LifecycleRefused):
    """A model cannot be unmapped while adapters are mapped."""

    code = "model_has_live_adapters"


class ModelHasPoolsError(LifecycleRefused):
    """A model cannot be unmapped while KV pools live."""

    code = "model_has_live_pools"


class ModelHasWorkspacesError(LifecycleRefused):
    """A model cannot be unmapped while workspaces live."""

    code = "model_has_live_workspaces"


class PoolHasSequencesError(LifecycleRefused):
    """A KV pool cannot be destroyed while sequences or prefixes live in it."""

    code = "pool_has_live_sequences"


class AdapterHasSequencesError(LifecycleRefused):
    """An adapter cannot be released while sequences or prefixes are bound to it."""

    code = "adapter_has_bound_sequences"


class MidTokenError(LifecycleRefused):
    """The sequence has read a token through some layers only; decode steps bring it to the token's end."""

    code = "mid_token"


class PrefixFrozenError(LifecycleRefused):
    """A frozen prefix does not change."""

    code = "prefix_frozen"


class PrefixNotFrozenError(LifecycleRefused):
    """A prefix can be adopted once it is frozen."""

    code = "prefix_not_frozen"


class PrefixAdapterError(LifecycleRefused):
    """A prefix was read with another adapter than the sequence's."""

    code = "prefix_adapter_mismatch"


class SequenceNotEmptyError(LifecycleRefused):
    """Only an empty sequence adopts a prefix."""

    code = "sequence_not_empty"


class NothingToDecodeError(LifecycleRefused):
    """A sequence without tokens has no next one."""

    code = "nothing_to_decode"


class PoolFullError(LifecycleRefused):
    """The KV pool has no block left."""

    code = "kv_pool_full"


class PoolSequencesError(LifecycleRefused):
    """The KV pool holds as many sequences and prefixes as it was made for."""

    code = "kv_pool_sequences_full"


class BusyError(LifecycleRefused):
    """Another call uses this object at this moment."""

    code = "busy"


class ReleasedError(LifecycleRefused):
    """The object was released, destroyed or unmapped."""

    code = "released"


class HiddenUnavailableError(LifecycleRefused):
    """There is no hidden state: no prefill ended well since the sequence was made or reset, or the last one failed."""

    code = "prefill_hidden_unavailable"


# What cannot be computed --------------------------------------------------------------------------


class DomainRefused(EmbedError):
    """Outside of what the model computes."""

    code = "domain_refused"


class TokenRangeError(DomainRefused):
    """A token id that the vocabulary does not have."""

    code = "token_out_of_range"


class ContextExceededError(DomainRefused):
    """More positions than the context has."""

    code = "context_exceeded"


class ChoiceError(DomainRefused):
    """No token could be chosen for this sequence: following its schema, or the choice itself, failed."""

    code = "choice_failed"


class NoTokenTextError(DomainRefused):
    """A token id of the model that the tokenizer has no text for: the vocabulary is padded."""

    code = "token_without_text"


# Schemas ------------------------------------------------------------------------------------------


class SchemaRefused(EmbedError):
    """A schema, or what it is used with."""

    code = "schema_refused"


class UnknownSchemaError(SchemaRefused):
    """The model has no schema of that name."""

    code = "schema_unknown"


class SchemaUnsatisfiableError(SchemaRefused):
    """A schema that cannot be followed: it asks for what nothing satisfies, or for what is not supported."""

    code = "schema_unsatisfiable"


class SchemaBindError(SchemaRefused):
    """A schema is bound to a new or reset sequence only."""

    code = "schema_bind_rejected"


class SchemaUnboundError(SchemaRefused):
    """A span of schema content for a sequence without a schema."""

    code = "schema_unbound"


class SpanUnreachableError(SchemaRefused):
    """The schema does not allow a token of the span; those before it were read."""

    code = "schema_span_unreachable"


class PrefixSchemaError(SchemaRefused):
    """A prefix was read under another schema than the sequence's."""

    code = "prefix_schema_mismatch"


class RestoreSchemaError(SchemaRefused):
    """A blob of a sequence whose schema the model does not have, or has with another content."""

    code = "restore_schema_mismatch"


# The process --------------------------------------------------------------------------------------


class AllocationError(EmbedError):
    """The process has no memory for what a call needs beside the caller's buffers."""

    code = "allocation_failed"
