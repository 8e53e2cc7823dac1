"""Chats in a real browser with a real model that takes pictures, and the samples that they leave."""

import io
import re
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.console.conftest import DARK_PHONE, ELSEWHERE, LIGHT, Keyed, Looking
from tests.console.hostile import HOSTILE
from tests.running import Server


def picture(kind: str = "png") -> FilePayload:
    """A file as a person chooses it."""
    content = io.BytesIO()
    Image.new("RGB", (64, 32), (200, 40, 60)).save(content, kind)
    return {"name": f"<b>.{kind}", "mimeType": f"image/{kind}", "buffer": content.getvalue()}


def begin(page: Page, **fields: str) -> None:
    """Wait for the page, and fill its settings."""
    page.wait_for_selector("#playground[data-ready]")
    for name, value in fields.items():
        page.evaluate("([name, value]) => { document.getElementById(name).value = value; }", [name, value])


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def wait_for_answers(page: Page, count: int) -> None:
    expect(page.locator(".answer")).to_have_count(count)
    expect(page.locator(".answer.running")).to_have_count(0)
    expect(page.locator(".answer .bad")).to_have_count(0)


def test_a_chat_streams_and_can_be_stopped(look: Looking, server: Server) -> None:
    with look.at("/playground") as page:
        begin(page, max_tokens="20000", n="2")
        say(page, f"Say much. {HOSTILE}")
        streaming = page.locator(".answer.running .said-text").first
        expect(streaming).to_have_text(re.compile(r"\S+"))  # while it is still running
        page.click("#stop")
        expect(page.locator(".answer small", has_text="stopped")).to_have_count(2)
        expect(page.locator(".say .bubble")).to_contain_text(HOSTILE)
    server.wait_for_status(lambda status: status["samples"]["running"] == 0)


def test_two_models_answer_with_a_picture_and_branches_are_kept(look: Looking, http: httpx.Client) -> None:
    offered = http.get(f"{look.url}/playground.json").json()["checkpoints"]
    saved = next(each["name"] for each in offered if each["base_model"] == "seeing")
    with look.at(f"/playground?model=seeing&beside={saved}", DARK_PHONE) as page:
        begin(page, n="2")
        page.locator(".more-settings summary").click()
        page.get_by_label("Most tokens").fill("6")
        look.judge(page, DARK_PHONE, LIGHT, DARK_PHONE)  # open settings lie over nothing
        page.set_input_files("#file", files=[picture()])
        expect(page.locator("#pictures img")).to_have_count(1)
        say(page, "What is it?")
        wait_for_answers(page, 4)
        assert page.locator(".say img").evaluate("image => image.naturalWidth") == 64
        page.locator(".answer").nth(2).get_by_role("button", name="continue from this").click()
        expect(page.locator(".answer").nth(2)).to_have_class(re.compile("chosen"))
        page.get_by_role("button", name="edit").click()
        page.locator(".say textarea").fill(f"And this? {HOSTILE}")
        page.get_by_role("button", name="Send as a branch").click()
        expect(page.locator(".acts", has_text="branch 2 of 2")).to_be_visible()
        wait_for_answers(page, 4)
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        begin(page)
        expect(page.locator(".say .bubble")).to_contain_text(f"And this? {HOSTILE}")
        wait_for_answers(page, 4)
        page.get_by_role("button", name="branch before").click()
        expect(page.locator(".say .bubble")).to_have_text("What is it?")
        expect(page.locator(".answer").nth(2)).to_have_class(re.compile("chosen"))
        expect(page.locator("#chats li")).to_have_count(1)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".answer")).to_have_count(0)
        page.locator("#chats li button").first.click()
        expect(page.locator(".answer")).to_have_count(4)
        page.locator("#chats .delete").click()
        expect(page.locator("#chats li")).to_have_count(0)


def test_tokens_tell_what_else_was_likely_and_errors_are_told(look: Looking) -> None:
    with look.at("/playground") as page:
        begin(page, max_tokens="6", top="3")
        say(page, "Tell.")
        wait_for_answers(page, 1)
        page.check("#shades")
        page.locator(".answer .t").first.hover()
        expect(page.locator("#token")).to_be_visible()
        expect(page.locator("#token tr")).to_have_count(3)
        expect(page.locator("#token")).to_contain_text("logprob -")
        page.goto(f"{look.url}/playground?model={HOSTILE}")
        begin(page)
        say(page, "Hello?")
        expect(page.locator(".answer .bad")).to_contain_text("is not served here")
        assert [each for each in look.complaints if "404" not in each] == []  # the browser tells of them
        look.complaints.clear()


def test_pictures_are_dropped_and_others_than_png_and_jpeg_converted(look: Looking) -> None:
    with look.at("/playground") as page:
        begin(page, max_tokens="4")
        data = page.evaluate_handle(
            """bytes => {
                const files = new DataTransfer();
                files.items.add(new File([new Uint8Array(bytes)], "dropped.webp", { type: "image/webp" }));
                return files;
            }""",
            list(picture("webp")["buffer"]),
        )
        page.dispatch_event("#composer", "drop", {"dataTransfer": data})
        expect(page.locator("#pictures img")).to_have_attribute("src", re.compile("^data:image/png;base64,"))
        page.get_by_role("button", name="Remove picture 1").click()
        expect(page.locator("#pictures img")).to_have_count(0)


def test_samples_are_listed_found_and_shown(look: Looking, server: Server, http: httpx.Client) -> None:
    with look.at("/playground") as page:
        begin(page, max_tokens="5", n="3", seed="7")
        page.set_input_files("#file", files=[picture("jpeg")])
        say(page, f"A rare word: xyzzy {HOSTILE}")
        wait_for_answers(page, 3)
        page.goto(f"{look.url}/samples")
        page.fill("input[type=search]", "XYZZY")
        page.press("input[type=search]", "Enter")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_contain_text("xyzzy")
        page.locator("tbody tr a").first.click()
        expect(page.locator(".member")).to_have_count(3)
        assert page.locator(".heard img").evaluate("image => image.naturalWidth") == 64
        expect(page.locator(".settings")).to_contain_text("seed")
        address = page.url
        page.get_by_role("link", name="Chat with these weights").click()
        page.wait_for_selector("#playground[data-ready]")
        assert page.locator("#model").input_value() == "seeing"
    shown = http.get(f"{address}.json").json()
    assert [len(answer["spans"]) for answer in shown["answers"]] == [answer["tokens"] for answer in shown["answers"]]
    assert http.get(f"{server.url}/samples/none:sample:0/1").status_code == 404
    listed = http.get(f"{server.url}/samples.json?sort=tokens").json()["samples"]
    counts = [each["tokens"] for each in listed]
    assert counts == sorted(counts, reverse=True)
    assert http.get(f"{server.url}/samples.json?sort=colour").status_code == 400


def test_chats_and_samples_of_a_tenant_with_two_http_servers(
    browser: Browser, keyed: Keyed, http: httpx.Client, tmp_path: Path
) -> None:
    """Under a name and without HTTPS, where browsers give pages less. Another tenant finds nothing of it."""
    url = keyed.server.url.replace("127.0.0.1", ELSEWHERE)
    look = Looking(browser, url, tmp_path)
    with look.at("/playground") as page:
        keyed.log_in(page, "vision")
        begin(page, max_tokens="5")
        say(page, f"A rare word: xyzzy {HOSTILE}")
        wait_for_answers(page, 1)
        expect(page.locator("#chats li")).to_have_count(1)
        page.goto(f"{url}/samples?q=xyzzy")
        expect(page.locator("tbody tr")).to_have_count(1)
        page.locator("tbody tr a").first.click()
        expect(page.locator(".member")).to_have_count(1)
        place = page.url.removeprefix(url)
        page.goto(f"{url}/samples?q=xyzzy")
        look.judge(page, DARK_PHONE)
    for name, count in (("vision", 1), ("audio", 0), ("root", 1)):
        headers = {"X-API-Key": keyed.keys[name]}
        for _ in range(4):  # which of the two answers is chance
            assert http.get(f"{keyed.server.url}/samples.json", headers=headers).json()["count"] == count
            assert http.get(f"{keyed.server.url}{place}", headers=headers).status_code == (200 if count else 404)
