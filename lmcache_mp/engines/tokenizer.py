"""Text to token ids and back, from a GGUF's vocabulary.

Byte-level BPE (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) is
encoded by the ``tokenizers`` package, and the random models' bytes need none. SentencePiece
vocabularies are only decoded. Vocabulary kinds, token types and the names of pre-tokenizers are
those of GGUF and llama.cpp.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from lmcache_mp.engines.vocabulary import TokenizerMaterial
from lmcache_mp.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    import jinja2
    from tokenizers.pre_tokenizers import PreTokenizer

Encoder = Callable[[str], list[int]]

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_INSTEAD = "pass token ids instead of text, made with the model's own tokenizer"

# What a pre-tokenizer cuts a text at, one pattern after the other.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # the digits of a number go together up to a count
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_CL100K % 3,),
    "llama3": (_CL100K % 3,),
    "llama-v3": (_CL100K % 3,),
    "qwen2": (_CL100K % 1,),
}
#: Those whose models take a piece that is a token as it is, whatever the merges make of it.
_WHOLE_PIECES = frozenset({"llama-bpe", "llama3", "llama-v3"})
#: Those whose models compose characters first (Unicode normal form C).
_COMPOSED = frozenset({"qwen2"})


class Tokenizer:
    """The tokenizer of a model; safe to share between threads.

    Ids turn into text for every kind of vocabulary that a Llama has; ``encode`` and ``chat`` raise
    UsageError where text can't be turned into the ids the model was trained with.
    """

    def __init__(self, material: TokenizerMaterial) -> None:
        """UsageError: a kind of vocabulary that has no text here, or a broken one."""
        if material.kind not in ("gpt2", "bytes", "llama"):
            raise UsageError(
                f"the model has a vocabulary of kind {material.kind!r}, whose tokens can't be "
                "turned into text; there are: gpt2 (byte-level BPE), llama (SentencePiece)"
            )
        if len(material.types) not in (0, len(material.tokens)):
            raise UsageError(
                f"the model's vocabulary is broken: {len(material.tokens)} tokens, but "
                f"{len(material.types)} token types"
            )
        self._material = material
        self._types = material.types or (_NORMAL,) * len(material.tokens)

    @classmethod
    def open(cls, model: str | os.PathLike[str] | None) -> Tokenizer:
        """The tokenizer of a model, named as for ``connect_local``."""
        from lmcache_mp.engines.weights import open_tokenizer_material

        return cls(open_tokenizer_material(model))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens that are written in it become their ids.

        With ``add_special`` the beginning-of-sequence token comes first if the model wants one and
        the text does not begin with it. UsageError: no tokenizer for this vocabulary, or no text;
        MissingExtraError: the package ``tokenizers`` is missing.
        """
        if not isinstance(text, str):
            raise UsageError(f"a text to encode must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"character {error.start} of the text is half of a surrogate pair, which UTF-8 "
                "can't express; decode the text's bytes again, with errors='replace'"
            ) from error
        ids = self._encoder(text)
        bos = self._material.bos_id
        if add_special and self._material.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``. Special tokens have none; broken UTF-8 gives U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """A token's part of the UTF-8 of a text. UsageError: an id outside the vocabulary."""
        if not 0 <= token_id < len(self._material.tokens):
            raise UsageError(
                f"token id {token_id} is outside of the vocabulary, which has "
                f"{len(self._material.tokens)} tokens"
            )
        token, type_ = self._material.tokens[token_id], self._types[token_id]
        if type_ == _BYTE:  # written <0xAB>
            return bytes.fromhex(token[3:5])
        if type_ not in (_NORMAL, _USER_DEFINED):
            return b""
        if self._material.kind == "llama":
            return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        if type_ == _NORMAL and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next message begins.

        ``messages``: ``[{"role": ..., "content": ...}, ...]``, written out by the model's chat
        template (Jinja, in a sandbox). Special tokens that a message contains count as such.
        UsageError: messages the template does not take, or no template; MissingExtraError: a
        package is missing.
        """
        conversation = _checked(messages)
        if self._material.kind == "bytes":
            begin, end = self._text_of(self._material.bos_id), self._text_of(self._material.eos_id)
            turns = [f"{begin}{one['role']}\n{one['content']}{end}\n" for one in conversation]
            text = "".join(turns) + f"{begin}assistant\n"
        else:
            text = self._render(conversation)
        return self.encode(text, add_special=False)  # the template wrote them

    def _render(self, conversation: Sequence[Mapping[str, str]]) -> str:
        template = self._template
        try:
            return template.render(
                messages=conversation,
                add_generation_prompt=True,
                bos_token=self._text_of(self._material.bos_id),
                eos_token=self._text_of(self._material.eos_id),
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template is a program of the model's, and may raise anything
            raise UsageError(f"the model's chat template refuses the messages: {error}") from error

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._material.tokens[token_id]

    @cached_property
    def _encoder(self) -> Encoder:
        special = [
            token
            for token, type_ in zip(self._material.tokens, self._types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED) and token
        ]
        if self._material.kind == "gpt2":
            return _byte_level_bpe(self._material, special)
        if self._material.kind == "bytes":
            return _raw_bytes(self._material, special)
        raise UsageError(
            "the model has a SentencePiece vocabulary, for which there is no tokenizer here: "
            + _INSTEAD
        )

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._material.chat_template is None:
            raise UsageError(
                "the model has no chat template: write the conversation as its text, and encode it"
            )
        return _compiled(self._material.chat_template)


class TextStream:
    """Text of token ids that come one by one, in whole characters.

    A character may span several tokens; it comes with the last of them. All that was pushed and
    then flushed is what ``decode`` gives for all ids together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left: U+FFFD for an incomplete character. The stream can be used again."""
        return self._decoder.decode(b"", True)


# --- encoders -------------------------------------------------------------------------------------


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's way to write bytes: one that prints stands for itself, the others start at U+0100."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _bytes_of_characters()


def _raw_bytes(material: TokenizerMaterial, special: Sequence[str]) -> Encoder:
    ids = {token: token_id for token_id, token in enumerate(material.tokens)}
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(text: str) -> list[int]:
        encoded: list[int] = []
        for place, piece in enumerate(pattern.split(text)):
            # What the pattern matched comes at odd places.
            encoded += [ids[piece]] if place % 2 else piece.encode()
        return encoded

    return encode


def _byte_level_bpe(material: TokenizerMaterial, special: Sequence[str]) -> Encoder:
    if material.pre not in _SPLITS:
        name = f"the pre-tokenizer {material.pre!r}" if material.pre else "no pre-tokenizer"
        raise UsageError(
            f"the model names {name}; known are {', '.join(_SPLITS)}. With another one the ids "
            f"would be wrong: {_INSTEAD}"
        )
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("encoding text", "local") from error
    try:
        bpe = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocab={token: token_id for token_id, token in enumerate(material.tokens)},
                merges=[_pair(merge) for merge in material.merges],
                ignore_merges=material.pre in _WHOLE_PIECES,
            )
        )
    except Exception as error:  # the package raises no narrower type
        raise UsageError(f"the model's vocabulary is broken ({error}): {_INSTEAD}") from error
    bpe.pre_tokenizer = _pre_tokenizer(_SPLITS[material.pre])
    if material.pre in _COMPOSED:
        bpe.normalizer = tokenizers.normalizers.NFC()
    bpe.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )

    def encode(text: str) -> list[int]:
        return list(bpe.encode(text, add_special_tokens=False).ids)

    return encode


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(patterns: Sequence[str]) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


# --- chat -----------------------------------------------------------------------------------------


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    form = 'messages must be a list of {"role": ..., "content": ...} with strings'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"{form}, and not empty; got {messages!r}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise UsageError(f"{form}; message {place} is {message!r}")
    return [dict(message) for message in messages]


def _compiled(source: str) -> jinja2.Template:
    """A template in the environment that chat templates are written for: that of transformers."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("chat templates", "local") from error

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UsageError(f"the model's chat template can't be read: {error}") from error
