"""What a pass starts from, and what it changes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

#: Token ids are kept as C ints: 4 bytes each instead of a list's 36.
Ids = array

# Changes travel between processes, one a pass: tuples pickle several times as fast as dataclasses.

#: What an edit's ``info`` may hold.
Scalar = bool | int | float | str | None


def _no_ids() -> Ids[int]:
    return array("i")


def ids_of(tokens: Sequence[int] | bytes) -> Ids[int]:
    """Token ids, or their int32 bytes, as a compact array."""
    ids = array("i")
    ids.frombytes(tokens) if isinstance(tokens, bytes) else ids.extend(tokens)
    return ids


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a pass needs to know of a request.

    ``tokens`` back the stored KV and are sent as the next prompt, followed by ``suffix``, which has
    no stored KV. ``kv_salt`` is the salt of the KV as it stands (``cache_salt`` until an edit).
    ``kv_tokens`` leading tokens have, or are about to have, KV. ``stored_tokens`` is what the last
    edit stored and the next generate must use; 0 without an edit.
    """

    tokens: Ids[int]
    cache_salt: str
    kv_salt: str
    kv_tokens: int
    suffix: Ids[int] = field(default_factory=_no_ids)
    stored_tokens: int = 0
    edits: int = 0

    @classmethod
    def start(cls, prompt_token_ids: Sequence[int], cache_salt: str) -> StreamState:
        """A request that has not run yet."""
        tokens = ids_of(prompt_token_ids)
        return cls(tokens, cache_salt, cache_salt, len(tokens))

    def prompt(self, suffix_tokens: Sequence[int] = ()) -> Ids[int]:
        """The tokens that the next generate sends."""
        prompt = self.tokens + self.suffix
        prompt.extend(suffix_tokens)
        return prompt

    def after_generate(self, change: Generated) -> StreamState:
        """The state once a generate has succeeded."""
        tokens = self.prompt(change.suffix_tokens)
        kv_tokens = len(tokens)
        tokens.frombytes(change.ids)
        return StreamState(
            tokens,
            self.cache_salt,
            self.kv_salt,
            kv_tokens,
            stored_tokens=self.stored_tokens,
            edits=self.edits,
        )

    def after_edit(self, change: Edited) -> StreamState:
        """The state once an edit has succeeded: tokens beyond the edited KV become the suffix."""
        return replace(
            self,
            tokens=ids_of(change.tokens),
            suffix=self.tokens[change.covered :] + self.suffix,
            kv_salt=change.kv_salt,
            kv_tokens=change.stored_tokens,
            stored_tokens=change.stored_tokens,
            edits=self.edits + 1,
        )


class Generated(NamedTuple):
    """What a generate adds to its stream: int32 bytes of the new ids, their text, and the end."""

    ids: bytes
    text: str
    done: bool
    suffix_tokens: tuple[int, ...] = ()


class Edited(NamedTuple):
    """What an edit makes of its stream: int32 bytes of new tokens, in place of ``covered`` ones."""

    tokens: bytes
    covered: int
    kv_salt: str
    stored_tokens: int
    info: Mapping[str, Scalar] | None = None
