"""Text to ids and back: the model's ids, whole characters, and refusals that say what to do."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from lmcache_mp.engines.tokenizer import TextStream, Tokenizer
from lmcache_mp.engines.vocabulary import TokenizerMaterial
from lmcache_mp.errors import MissingExtraError, UsageError

ALPHABET = tuple(sorted(ByteLevel.alphabet()))
SPECIAL = ("<s>", "</s>", "<|im|>")
MERGED = ("12", "123", "1234", "ab", "\u0120a", "\u0120ab", "\u0120" + "1", "\u00c3\u00a9", "xyz")
MERGES = ("1 2", "12 3", "123 4", "a b", "\u0120 ab", "\u0120 1", "\u00c3 \u00a9")
PRES = ("default", "gpt-2", "smollm", "llama-bpe", "llama3", "qwen2")


def material(pre="gpt-2", **changes):
    """A byte-level vocabulary: every byte, a few merges, special and user-defined tokens."""
    tokens = (*SPECIAL, *ALPHABET, *MERGED, "<usé>")
    normal = len(ALPHABET) + len(MERGED)
    plain = TokenizerMaterial(
        kind="gpt2",
        pre=pre,
        tokens=tokens,
        merges=MERGES,
        types=(3,) * len(SPECIAL) + (1,) * normal + (4,),
        bos_id=0,
        eos_id=1,
        add_bos=False,
        chat_template=None,
    )
    return replace(plain, **changes)


def pieces(tokenizer, text):
    """The text of each token of ``text``."""
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


BPE = Tokenizer(material())
BYTES = Tokenizer.open("random:0")
SENTENCEPIECE = Tokenizer(
    material(
        kind="llama",
        tokens=("<unk>", "<s>", "</s>", "<0x0A>", "<0xF0>", "\u2581Hello", "\u2581", "wörld"),
        types=(2, 3, 3, 6, 6, 1, 1, 1),
        merges=(),
    )
)


# Encoding and decoding


@pytest.mark.parametrize("pre", [pre for pre in PRES if pre != "qwen2"])  # it composes characters
def test_text_comes_back_whatever_the_pre_tokenizer(pre):
    tokenizer = Tokenizer(material(pre))

    @given(st.text().filter(lambda text: not any(token in text for token in SPECIAL)))
    @example("".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 37), 0x1F999, 0x10FFFF])))
    def comes_back(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    comes_back()


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("default", [" ", "123", "4"]),
        ("gpt-2", [" ", "1234"]),
        ("smollm", [" ", "1", "2", "3", "4"]),
        ("llama-bpe", [" ", "123", "4"]),
        ("llama3", [" ", "123", "4"]),
        ("qwen2", [" ", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers_cut_numbers_as_their_models_expect(pre, digits):
    assert pieces(Tokenizer(material(pre)), " 1234") == digits


@pytest.mark.parametrize("pre", PRES)
def test_a_space_goes_with_the_word_that_follows(pre):
    assert pieces(Tokenizer(material(pre)), "ab  ab\nab") == ["ab", " ", " ab", "\n", "ab"]


def test_unicode_digits_are_digits():
    tokenizer = Tokenizer(
        material("smollm", tokens=(*material().tokens, "²²"), types=(), merges=())
    )
    assert len(tokenizer.encode("²²")) == 4
    merged = material("smollm", merges=("\u00c2 \u00b2", "\u00c2\u00b2 \u00c2\u00b2"))
    merged = replace(merged, tokens=(*merged.tokens, "\u00c2\u00b2", "\u00c2\u00b2" * 2), types=())
    assert pieces(Tokenizer(merged), "²²") == ["²", "²"]
    assert pieces(Tokenizer(replace(merged, pre="gpt-2")), "²²") == ["²²"]


def test_a_whole_piece_that_is_a_token_needs_no_merges_in_llama_3():
    assert pieces(Tokenizer(material("llama-bpe")), "xyz") == ["xyz"]
    assert pieces(Tokenizer(material("gpt-2")), "xyz") == ["x", "y", "z"]


def test_only_qwen_composes_characters():
    decomposed = "e\N{COMBINING ACUTE ACCENT}"
    assert pieces(Tokenizer(material("qwen2")), decomposed) == ["é"]
    assert BPE.decode(BPE.encode(decomposed)) == decomposed


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_an_empty_text_has_no_tokens(tokenizer):
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_special_tokens_in_the_text_become_their_ids_and_have_no_text():
    a, b = BPE.encode("a") + BPE.encode("b")
    assert BPE.encode("<s>a<|im|>b</s>") == [0, a, 2, b, 1]
    assert BPE.decode([0, a, 2, b, 1]) == "ab"
    assert BPE.decode(BPE.encode("<s")) == "<s"


def test_a_user_defined_token_is_its_text():
    tokens = material().tokens
    assert BPE.encode("a<usé>") == [*BPE.encode("a"), len(tokens) - 1]
    assert BPE.decode([len(tokens) - 1]) == "<usé>"


def test_the_beginning_of_the_sequence_is_added_once_and_only_if_the_model_wants_it():
    wanting = Tokenizer(material(add_bos=True))
    plain = BPE.encode("ab")
    assert wanting.encode("ab") == [0, *plain]
    assert wanting.encode("<s>ab") == [0, *plain]
    assert wanting.encode("ab", add_special=False) == plain
    assert wanting.encode("") == [0]
    assert BPE.encode("<s>ab") == [0, *plain]


@given(st.text())
def test_the_random_models_encode_bytes(text):
    if "<" not in text:
        assert BYTES.encode(text) == list(text.encode())
        assert BYTES.decode(BYTES.encode(text)) == text


def test_the_random_models_know_their_special_tokens():
    assert BYTES.encode("é<begin>x<end>") == [0xC3, 0xA9, 257, ord("x"), 256]
    assert BYTES.decode([0xC3, 0xA9, 257, ord("x"), 256, 319]) == "éx"


def test_bytes_need_no_special_tokens():
    tokens = tuple(f"<0x{byte:02X}>" for byte in range(256))
    plain = Tokenizer(material(kind="bytes", tokens=tokens, types=(6,) * 256, merges=()))
    assert plain.encode("<é>") == list("<é>".encode())


@pytest.mark.parametrize("kind", ["gpt2", "bytes"])
def test_the_longest_special_token_is_found(kind):
    tokens = (*material().tokens, "<a>", "<a><b>")
    types = (*material().types, 3, 3)
    tokenizer = Tokenizer(material(kind=kind, tokens=tokens, types=types))
    assert tokenizer.encode("<a><b><a>") == [len(tokens) - 1, len(tokens) - 2]


def test_sentencepiece_is_decoded_but_not_encoded():
    assert SENTENCEPIECE.decode([1, 5, 6, 7, 3, 0, 2]) == " Hello wörld\n"
    with pytest.raises(UsageError, match=r"SentencePiece.*pass token ids instead"):
        SENTENCEPIECE.encode("Hello")


# Text as it comes


@pytest.mark.parametrize("tokenizer", [BPE, BYTES, SENTENCEPIECE], ids=["bpe", "bytes", "spm"])
def test_pieces_of_a_stream_are_the_text_of_all_its_ids(tokenizer):
    vocabulary = {BPE: len(material().tokens), BYTES: 320, SENTENCEPIECE: 8}[tokenizer]
    any_ids = st.lists(st.integers(0, vocabulary - 1), max_size=30)
    cut_text = st.text(max_size=8).map(lambda text: list(text.encode())[:-1])

    @given(any_ids | cut_text if tokenizer is BYTES else any_ids)
    def agree(ids):
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)

    agree()


@given(st.text(min_size=1).filter(lambda text: "<" not in text))
def test_a_character_comes_with_its_last_token(text):
    stream = TextStream(BYTES)
    for character in text:
        *first, last = BYTES.encode(character)
        assert [stream.push(token) for token in first] == [""] * len(first)
        assert stream.push(last) == character
    assert stream.flush() == ""


def test_an_incomplete_character_is_replaced_at_the_end_and_forgotten():
    stream = TextStream(BYTES)
    assert [stream.push(token) for token in "🦙".encode()[:3]] == ["", "", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(ord("a")) == "a" and stream.flush() == ""


# Chat


def test_a_chat_is_written_by_the_models_template():
    template = """
    {%- for message in messages %}
        {{- bos_token if loop.first }}
        {%- if message.role == 'skip' %}{% continue %}{% endif %}
{{ message['role'] }}: {{ message['content'] | trim }}{{ eos_token }}
    {% endfor %}
    {% if add_generation_prompt and tools is none %}
assistant:
    {%- endif %}"""
    tokenizer = Tokenizer(material(chat_template=template, add_bos=True))
    messages = [
        {"role": "user", "content": " é<|im|> "},
        {"role": "skip", "content": "never seen"},
        {"role": "assistant", "content": "b"},
    ]
    text = "<s>user: é<|im|></s>\nassistant: b</s>\nassistant:"
    assert tokenizer.chat(messages) == BPE.encode(text)


def test_a_template_may_refuse_messages():
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}a"
    tokenizer = Tokenizer(material(chat_template=template, add_bos=True))
    assert tokenizer.chat([{"role": "user", "content": ""}]) == BPE.encode("a")
    with pytest.raises(UsageError, match="refuses the messages: user first"):
        tokenizer.chat([{"role": "system", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{% unknown %}",
    ],
)
def test_a_bad_template_is_an_error_and_does_nothing(template):
    with pytest.raises(UsageError, match="chat template"):
        Tokenizer(material(chat_template=template)).chat([{"role": "user", "content": "a"}])


def test_a_template_can_tell_the_date():
    tokenizer = Tokenizer(material(chat_template="{{ strftime_now('%Y') | length }}"))
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == BPE.encode("4")


def test_without_a_template_there_is_no_chat():
    with pytest.raises(UsageError, match="no chat template"):
        BPE.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        ["hello"],
        {"role": "user", "content": "a"},
        [{"role": "user"}],
        [{"role": "user", "content": None}],
    ],
    ids=str,
)
def test_messages_are_checked(messages):
    with pytest.raises(UsageError, match="messages must be"):
        BYTES.chat(messages)


def test_the_random_models_have_a_chat_format():
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "b"}]
    text = "<begin>user\nhé<end>\n<begin>assistant\nb<end>\n<begin>assistant\n"
    assert BYTES.chat(messages) == BYTES.encode(text)


# Refusals


@pytest.mark.parametrize("pre", ["", "tekken"])
def test_a_pre_tokenizer_that_is_not_known_is_refused_only_for_text(pre):
    tokenizer = Tokenizer(material(pre))
    assert tokenizer.decode(BPE.encode("ab")) == "ab"
    with pytest.raises(UsageError, match=f"{pre or 'no pre-tokenizer'}.*pass token ids instead"):
        tokenizer.encode("ab")


def test_other_kinds_of_vocabulary_are_refused():
    with pytest.raises(UsageError, match=r"'bert'.*gpt2"):
        Tokenizer(material(kind="bert"))


@pytest.mark.parametrize("merge", ["a never", "a", ""])
def test_a_broken_vocabulary_is_refused(merge):
    with pytest.raises(UsageError, match=r"vocabulary is broken.*pass token ids"):
        Tokenizer(material(merges=(merge,))).encode("a")
    with pytest.raises(UsageError, match="1 token types"):
        Tokenizer(material(types=(1,)))


@pytest.mark.parametrize("token", [-1, 320, 10**9])
def test_ids_outside_of_the_vocabulary_are_refused(token):
    with pytest.raises(UsageError, match=f"{token} is outside .* 320 tokens"):
        BYTES.decode([1, token])
    with pytest.raises(UsageError, match=f"{token} is outside"):
        TextStream(BYTES).push(token)


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_what_is_no_unicode_text_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"character 2 .*surrogate"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(UsageError, match="bytes"):
        tokenizer.encode(b"ab")


def test_what_is_not_installed_is_named_with_the_extra_that_adds_it(monkeypatch):
    message = [{"role": "user", "content": "a"}]
    ids = BPE.encode("ab")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"encoding text.*lmcache_mp\[local\]"):
        Tokenizer(material()).encode("a")
    with pytest.raises(MissingExtraError, match=r"chat templates.*lmcache_mp\[local\]"):
        Tokenizer(material(chat_template="a")).chat(message)
    assert Tokenizer(material()).decode(ids) == "ab"
    assert Tokenizer.open("random:1").chat(message)


# The packaged model: what SmolLM2's own tokenizer gives (each digit alone, then GPT-2's pieces).


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.open(None)


RECORDED = {
    "Hello world": [19556, 905],
    " 1 2  3": [216, 33, 216, 34, 256, 35],
    "In 2024, x=10**6+3.14": [
        788,
        216,
        34,
        32,
        34,
        36,
        28,
        1792,
        45,
        33,
        32,
        828,
        38,
        27,
        35,
        30,
        33,
        36,
    ],
    "٣٤ ½ ² Ⅷ": [164, 113, 164, 114, 216, 16738, 216, 19133, 216, 173, 223, 117],
    "日本語、漢字12と": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        29917,
        177,
        137,
        112,
        36518,
        33,
        34,
        7365,
        118,
    ],
    "🦙👩\u200d👧 ok": [10813, 116, 243, 10813, 235, 119, 321, 231, 10813, 235, 117, 10907],
    "\n\n  \tdef f(x):\n    return x  # 42\n": [
        39892,
        197,
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        216,
        907,
        216,
        36,
        34,
        198,
    ],
    "don't we'll I'VE": [12420, 982, 392, 3060, 339, 23, 18525],
    "a<|im_end|>b <|im_end|>\n": [81, 2, 82, 216, 2, 198],
}


@pytest.mark.weights
@pytest.mark.oracle
@pytest.mark.parametrize("text", RECORDED)
def test_the_packaged_model_gets_the_ids_it_was_trained_with(smollm2, text):
    assert smollm2.encode(text) == RECORDED[text]
    assert smollm2.decode(RECORDED[text]) == text.replace("<|im_end|>", "")


@pytest.mark.weights
def test_the_packaged_models_chat_is_chatml_with_a_system_message(smollm2):
    system = "<|im_start|>system\nBe terse.<|im_end|>\n"
    turns = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "1+1?"}]
    assert smollm2.chat(messages) == smollm2.encode(system + turns)
    alone = smollm2.chat(messages[1:])
    assert smollm2.encode(turns) == alone[-len(smollm2.encode(turns)) :]
    assert smollm2.decode(alone).startswith("system\nYou are a helpful AI assistant named SmolLM")
