"""Server-sent events: the same events however the network cuts the body."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.engines.sse import EventParser

ENDS = (b"\n", b"\r\n", b"\r")
BOM = b"\xef\xbb\xbf"


def events_of(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


def cut(body: bytes, places: list[int]) -> list[bytes]:
    """``body`` in pieces, some of them empty."""
    bounds = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(bounds)]


#: What may stand in a line: anything but a line end, and often what the parser looks for.
lines = st.one_of(
    st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=12),
    st.sampled_from(["", " x", "data: y", ": no comment", "\u2028", "\x85", "\x0b\x0c"]),
).map(str.encode)
noise = st.sampled_from([b": ping", b":", b"event: message", b"id: 7", b"retry: 10", b"date: z"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A body and its events; each line has a line end of its own."""
    body = draw(st.sampled_from([b"", BOM]))
    events = draw(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=4))
    for event in events:
        for line in event:
            for other in draw(st.lists(noise, max_size=1)):
                body += other + draw(st.sampled_from(ENDS))
            # The one space after the colon is no part of the data.
            space = b" " if line.startswith(b" ") else draw(st.sampled_from([b"", b" "]))
            body += b"data:" + space + line + draw(st.sampled_from(ENDS))
        end = draw(st.sampled_from(ENDS))
        if body.endswith(b"\r") and end == b"\n":  # the two would be one line end
            end = b"\r"
        body += end
    return body, [b"\n".join(event) for event in events]


@given(bodies(), st.lists(st.integers(0, 1000), max_size=8))
def test_any_cutting_gives_the_events_of_the_whole(
    made: tuple[bytes, list[bytes]], places: list[int]
) -> None:
    body, events = made
    assert events_of(body) == events
    assert events_of(*cut(body, places)) == events
    assert events_of(*(body[i : i + 1] for i in range(len(body)))) == events


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_any_bytes_in_any_cutting_are_read_alike(body: bytes, places: list[int]) -> None:
    assert events_of(*cut(body, places)) == events_of(body)


@given(st.text("\n\rd:a t", max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_line_ends_in_any_order_and_cutting_are_read_alike(text: str, places: list[int]) -> None:
    body = text.replace("d", "data").encode()
    with_newlines = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert events_of(*cut(body, places)) == events_of(with_newlines)


@pytest.mark.parametrize("end", ENDS)
def test_each_line_end(end: bytes) -> None:
    assert events_of(end.join([b"data: a", b"data: b", b"", b"data: c", b"", b""])) == [
        b"a\nb",
        b"c",
    ]


def test_an_event_comes_with_its_blank_line_and_not_before() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\n\nda") == [b"a", b"b"]
    assert parser.feed(b"ta: c\r\n\r") == [b"c"]  # a CR ends a line, whether or not an LF follows
    assert parser.feed(b"\ndata: d\n\n") == [b"d"]


def test_what_has_no_blank_line_yet_is_no_event() -> None:
    assert events_of(b"data: a\n\ndata: b\n") == [b"a"]


def test_comments_and_other_fields_are_dropped() -> None:
    assert events_of(b": ping\n\nevent: x\nid: 1\ndata: a\n: data: no\nretry: 5\n\n: ping\n\n") == [
        b"a"
    ]


def test_a_byte_order_mark_may_stand_at_the_beginning_only() -> None:
    assert events_of(BOM + b"data: a\n\n") == [b"a"]
    assert events_of(*(bytes([byte]) for byte in BOM + b"data: a\n\n")) == [b"a"]
    assert events_of(b"data: a\n\n" + BOM + b"data: b\n\n") == [b"a"]
    assert events_of(b"data: " + BOM + b"\n\n") == [BOM]


def test_several_data_lines_and_empty_ones() -> None:
    assert events_of(b"data\n\n") == [b""]
    assert events_of(b"data:\ndata:  b\ndata\n\n") == [b"\n b\n"]
    assert events_of(b"datum: a\ndata : b\n\n") == []


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_no_other_character_ends_a_line(character: str) -> None:
    assert events_of(f"data: a{character}b\n\n".encode()) == [f"a{character}b".encode()]
