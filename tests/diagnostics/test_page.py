"""The page, opened and clicked through in a real browser where there is one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, executable
from tiny_study import PREFILL, STEPS, Words, article, tight

from qevict.config import Budget
from qevict.diagnostics.conditions import method_condition
from qevict.diagnostics.page import MIXED, cells, log_steps, page, pieces
from qevict.diagnostics.policy import ABSENT, LOCAL, SINK, PolicyTrace
from qevict.diagnostics.recording import record_policies
from qevict.diagnostics.reference import record_reference, trace_header
from qevict.diagnostics.trace import Trace
from qevict.routing import EVICTED, FULL, QUANTIZED
from tiny import tiny_model

Made = tuple[Trace, dict[str, PolicyTrace], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    model, text, folder = tiny_model("llama"), article(), tmp_path_factory.mktemp("page")
    header = trace_header(
        model, text.tokens[:PREFILL], STEPS, title="Salt </script> & pepper", name="tiny", prompt_queries=[4]
    )
    trace = record_reference(model, header, folder, continuation=text.tokens[PREFILL:])
    conditions = [tight(ranking="decayed", prompt_queries=4), method_condition("h2o", Budget(fraction=0.5))]
    policies, _ = record_policies(model, trace, conditions)
    path = folder / "page.html"
    path.write_text(page(trace, list(policies.values()), Words(), first="tight"), encoding="utf-8")
    return trace, policies, path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("no Chromium on this machine")
    with Browser(tmp_path / "profile") as opened:
        yield opened


def test_a_person_can_choose_a_layer_scrub_and_look_at_a_window(made: Made, browser: Browser) -> None:
    trace, policies, path = made
    policy = policies["tight"]
    browser.open(path)
    assert browser.text("h1") == "Where the cache kept “Salt </script> & pepper”"
    assert "windows of 4 tokens" in browser.text("#about")

    browser.set("#layer", 1)
    assert browser.text("#layer-name") == str(trace.header.layers[1])
    event = 3
    browser.set("#event", event)
    assert f"after {int(policy.lengths[event]) - PREFILL} new tokens" in browser.text("#event-name")

    windows = cells(policy.tiers[1], 2, 4)[event, 0].tolist()
    for word, state in (("full", FULL), ("codes", QUANTIZED), ("evicted", EVICTED)):
        assert f"{windows.count(state)} {word}" in browser.text("#now")

    window = windows.index(QUANTIZED)
    browser.mouse("#tiers", 0.5, (window + 0.5) / len(windows))
    assert f"Window {window}: tokens {2 + 4 * window} to {5 + 4 * window}" in browser.text("#window-name")
    assert "low-bit codes at this event" in browser.text("#window-state")
    words = [f"w{token}" for token in trace.header.tokens[2 + 4 * window : 6 + 4 * window]]
    assert browser.text("#window-text").split() == words
    assert browser.run("document.querySelectorAll('#history polyline').length") == 2, "the cache's score and full KV's"
    assert browser.run("document.querySelectorAll('#history rect').length") == len(policy.lengths)

    browser.mouse("#tiers", 0.5, (window + 0.5) / len(windows), click=True)
    browser.mouse("#tiers", 0.5, 0.01)
    assert "kept" in browser.text("#window-name"), "a click holds on to a window"
    assert not browser.errors


def test_a_policy_of_single_tokens_and_heads_is_shown_in_cells(made: Made, browser: Browser) -> None:
    browser.open(made[2])
    browser.set("#policy", 1)
    browser.run("new Promise((done) => setTimeout(done, 300))")
    assert browser.text("#about").endswith("at most.")
    assert "h2o" in browser.text("#about")
    assert browser.run("document.getElementById('lane').options.length") == 2
    browser.set("#lane", 1)
    browser.mouse("#attention", 0.9, 0.1)
    assert browser.text("#window-name").startswith("Window 0: tokens 5 to 12")
    assert browser.run("document.querySelectorAll('#history polyline').length") == 1, "h2o's scores are its own"
    assert not browser.errors


def test_light_and_dark_differ_and_can_be_switched(made: Made, browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(made[2], dark=False)
    light = browser.run(background)
    browser.mouse("#theme", 0.5, 0.5, click=True)
    switched = browser.run(background)
    browser.open(made[2], dark=True)
    assert browser.run(background) == switched != light


def test_it_plays_and_fits_a_narrow_screen(made: Made, browser: Browser) -> None:
    browser.open(made[2], width=420)
    beyond = "[...document.querySelectorAll('*')].filter((one) => one.getBoundingClientRect().right > innerWidth + 1)"
    assert browser.run(f"{beyond}.map((one) => one.tagName + one.id)") == []
    browser.mouse("#play", 0.5, 0.5, click=True)
    browser.run("new Promise((done) => setTimeout(done, 1000))")
    assert not browser.text("#event-name").startswith("1/")
    assert not browser.errors


def test_it_needs_no_network(made: Made, browser: Browser) -> None:
    browser.open(made[2])
    assert set(browser.requests) == {made[2].as_uri()}
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", made[2].read_text(encoding="utf-8"))


def test_the_text_is_in_the_page_piece_by_piece(made: Made) -> None:
    text = made[2].read_text(encoding="utf-8")
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None, "a text that closes a script element must not end the data"
    content = json.loads(data[1])
    assert "".join(content["pieces"]).split() == [f"w{token}" for token in made[0].header.tokens]


def test_characters_of_several_tokens_belong_to_the_last_of_them() -> None:
    class Bytes(Words):
        def decode(self, tokens: list[int], **settings: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    text = "naïve café, “日本” and so on: 日本語" * 3
    tokens = list(text.encode())
    made = pieces(Bytes(), tokens)
    assert len(made) == len(tokens)
    assert "".join(made) == text


def test_cells_of_tokens() -> None:
    states = [SINK, FULL, FULL, FULL, EVICTED, QUANTIZED, QUANTIZED, LOCAL, ABSENT, ABSENT]
    tiers = torch.tensor([[states]], dtype=torch.uint8)
    got = cells(tiers, sinks=1, window=2)[0, 0].tolist()
    assert got == [FULL, MIXED + 4, QUANTIZED, LOCAL, ABSENT]


def test_masses_survive_their_scale() -> None:
    mass = torch.tensor([0.0, 1e-3, 0.5, 12.0, 900.0])
    back = [0.0 if step == 0 else 1e-4 * (1e3 / 1e-4) ** ((step - 1) / 65534) for step in log_steps(mass).tolist()]
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(mass.tolist(), back, strict=True))
