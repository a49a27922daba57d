"""Stop strings: found wherever the text is cut, and never shown in part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.engines.completion import StopText

texts = st.text("ab", max_size=12)


@given(st.lists(texts, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(pieces, stops):
    text = "".join(pieces)
    checker, shown = StopText(stops), ""
    for piece in pieces:
        shown += checker.push(piece)
        assert text.startswith(shown)
        if checker.stopped:
            break
    else:
        shown += checker.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert checker.stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(shown + stop) for stop in stops)


@given(texts)
def test_without_stop_strings_nothing_is_held_back(text):
    assert StopText(()).push(text) == text


def test_only_what_may_be_a_stop_string_is_held_back():
    checker = StopText(["END", "DOT"])
    assert checker.push("abcE") == "abc"
    assert checker.push("N") == ""
    assert checker.push("x") == "ENx"
    assert checker.push("EN") == ""
    assert checker.push("D and more") == ""
    assert checker.stopped and checker.flush() == ""
