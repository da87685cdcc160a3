"""The page at ``/``: HTML for browsers and text for the rest, and in a real browser runs, figures, stop and errors."""

from __future__ import annotations

import re

import pytest

from server.browser import Browser, why_not
from server.fake_scheduler import RUN_LEN, SLOW
from server.live_server import LiveServer
from sgling.srt.entrypoints.info_routes import PAGE

REASON = why_not()
needs_browser = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def server():
    live = LiveServer().start()
    yield live
    live.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_browsers_get_the_page_and_everybody_else_a_line(server):
    with server.client() as client:
        page = client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.headers["content-type"].startswith("text/html") and "<textarea" in page.text
        assert "running" in client.get("/", headers={"Accept": "*/*"}).text
        assert "<" not in client.get("/", headers={"Accept": "application/json"}).text


def test_the_page_asks_nobody_else():
    assert re.findall(r"https?://|src=|@import", PAGE.read_text(encoding="utf-8")) == []


def test_the_page_needs_no_key_but_what_it_calls_does():
    live = LiveServer(api_key="secret").start()
    with live.client() as client:
        assert client.get("/", headers={"Accept": "text/html"}).status_code == 200
        assert client.get("/server_info").status_code == 401
    live.stop()


def send(browser: Browser, prompt: str, tokens: int) -> None:
    browser.run(f"document.getElementById('prompt').value = {prompt!r}")
    browser.run(f"document.getElementById('tokens').value = {tokens}")
    browser.click("#send")


@needs_browser
def test_accepted_runs_and_figures_are_shown(server, browser):
    browser.open(f"{server.base_url}/")
    send(browser, "The quick brown fox", 14)
    browser.wait_for("return document.getElementById('note').textContent.includes('ended: length')")
    runs = browser.run("return [...document.querySelectorAll('#answer span')].map(span => span.title)")
    assert runs == [f"{RUN_LEN} tokens"] * 4 + ["2 tokens"]
    figures = browser.run(
        "return ['count', 'steps', 'tpot', 'ttft'].map(id => document.getElementById(id).textContent)"
    )
    assert figures[0] == "14" and figures[1] == "5"
    assert figures[2].endswith("ms") and figures[3].endswith("ms")
    bars = browser.run("return [...document.querySelectorAll('#histogram div')].map(bar => bar.textContent)")
    assert bars == ["01", "12", "33", "04"]  # count, then run length; the first run comes from the prompt


@needs_browser
def test_stop_aborts_the_request(server, browser):
    browser.open(f"{server.base_url}/")
    aborted = len(server.scheduler.aborted)
    browser.run("window.fetchWas = window.fetch")
    browser.run(  # the scripted scheduler is slow for prompts that begin with a certain id
        "window.fetch = (url, options) => { if (url === '/generate') { const body = JSON.parse(options.body);"
        f"delete body.text; body.input_ids = [{SLOW}, 40]; options = {{...options, body: JSON.stringify(body)}}; }}"
        "return window.fetchWas(url, options); }"
    )
    send(browser, "slow", 200)
    browser.wait_for("return document.querySelectorAll('#answer span').length > 2")
    browser.click("#stop")
    browser.wait_for("return document.getElementById('error').textContent === 'stopped'")
    browser.wait_for("return !document.getElementById('send').disabled")
    for _ in range(100):
        if len(server.scheduler.aborted) > aborted:
            return
        browser.run("return 1")
    raise AssertionError("the server never heard of it")


@needs_browser
def test_a_refusal_is_shown(server, browser):
    browser.open(f"{server.base_url}/")
    send(browser, "hello", 100_000)
    shown = browser.wait_for("return document.getElementById('error').textContent")
    assert "maximum context length" in shown
