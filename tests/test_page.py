"""The page to play with, in a real browser: it answers as PyTorch does, and needs no net once it is loaded."""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastweights import FewShotClassifier
from fastweights.few_shot.images import Kind, read_pixels
from fastweights.reproduce.schlag2017.associative_retrieval import Settings, load_trained
from fastweights.tasks import gated_retrieval, omniglot

ROOT = Path(__file__).parent.parent
PLAY = ROOT / "docs" / "play"
DRAWINGS = ROOT / "docs" / "guides" / "drawings"
LINE = "S(hgb,c),S(ceaf,e),S(df,g),S(hac,b),Q(ceaf)e.S(hf,h),S(cc,d),Q(cc)d."


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page on this machine, where `make page` has built it."""
    if not (PLAY / "built" / "networks.json").exists():
        pytest.skip("the page is not built: run make page")
    handler = functools.partial(Quiet, directory=str(PLAY))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page after loading, offline; every request that it makes is in `page.requests`."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    page.requests, errors = [], []
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.get_by_text("The networks are loaded").wait_for()
    context.set_offline(True)
    yield page
    context.close()
    assert errors == []


def predict_in_page(page, described, labels, asked):
    """The probabilities of the page's classifier [N,classes], one drawing at a time, and the milliseconds of each."""
    answers = page.evaluate(
        """async ([described, labels, asked]) => {
            const { FewShotClassifier } = await import("./networks.js");
            const classifier = await FewShotClassifier.load();
            const scale = (ink) => ink.map((level) => level / 255);
            for (const [index, ink] of described.entries()) await classifier.teach(labels[index], scale(ink));
            const answers = [];
            for (const ink of asked) {
                const start = performance.now();
                const { probabilities } = await classifier.predict(scale(ink));
                answers.push([probabilities, performance.now() - start]);
            }
            return answers;
        }""",
        [described.flatten(1).tolist(), labels, asked.flatten(1).tolist()],
    )
    return torch.tensor([each for each, _ in answers]), [milliseconds for _, milliseconds in answers]


def test_the_page_names_drawings_as_the_classifier_does(page):
    page.context.set_offline(False)  # it loads a classifier of its own
    kind = Kind(1, 28, ink=True)
    described, asked = (
        read_pixels(sorted(DRAWINGS.glob(paths)), kind, resize=True) for paths in ("described/*/*.png", "asked/*.png")
    )
    labels = [0, 1, 2, 3, 4]
    for examples, names in ((described, labels), (torch.cat([described, asked[:3]]), [*labels, 0, 0, 1])):
        classifier = FewShotClassifier.load("omniglot")
        classifier.describe(examples, names)
        probabilities, _ = predict_in_page(page, examples, names, asked)
        torch.testing.assert_close(probabilities, classifier.predict(asked).probabilities, atol=1e-3, rtol=0)


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_the_page_names_a_thousand_drawings_of_omniglot_as_the_classifier_does(page):
    page.context.set_offline(False)
    data = omniglot.load()
    held_out = data.images[omniglot.few_shot_split(data).test].unsqueeze(2)
    generator = torch.Generator().manual_seed(0)
    classifier = FewShotClassifier.load("omniglot")
    times, same, right = [], 0, 0
    for _ in range(10):  # tasks of 20 signs, 5 drawings to name of each
        signs = held_out[torch.randperm(len(held_out), generator=generator)[:20]]
        described, asked = signs[:, 0], signs[:, 1:6].flatten(0, 1)
        classifier.describe(described, list(range(20)))
        probabilities, milliseconds = predict_in_page(page, described, list(range(20)), asked)
        answers = probabilities.argmax(1)
        same += int((answers == torch.tensor(classifier.predict(asked).labels)).sum())
        right += int((answers == torch.arange(20).repeat_interleave(5)).sum())
        times += milliseconds
    print(f"same {same}, right {right} of 1,000; median {np.median(times):.2f} ms, most {max(times):.2f} ms")
    assert same == 1000
    assert right > 900


def test_the_page_reads_a_line_as_the_layer_does(page):
    page.context.set_offline(False)
    read = page.evaluate(
        """async (line) => {
            const { GatedReader } = await import("./networks.js");
            const reader = await GatedReader.load();
            await reader.read(line.slice(0, 20) + "h"); // and then goes on from where the lines part
            const moments = await reader.read(line);
            return {
                probabilities: moments.slice(1).map((moment) => moment.probabilities),
                fast_2: Array.from(moments.at(-1).state.fast_2.data),
                asked: await reader.ask("hac", moments[line.indexOf("Q")]),
            };
        }""",
        LINE,
    )
    [trained] = load_trained(Settings(), "no run")
    characters = torch.tensor([[gated_retrieval.VOCABULARY.index(each)] for each in LINE])
    with torch.no_grad():
        logits, state = trained.network(characters)
    torch.testing.assert_close(torch.tensor(read["probabilities"]), logits[:, 0].softmax(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(read["fast_2"]).view(1, 40, 41), state.fast_2, atol=1e-3, rtol=0)
    assert gated_retrieval.VOCABULARY[int(torch.tensor(read["asked"]).argmax())] == "b"


def draw(page, *strokes, touch=False, second=()):
    """Draw strokes, each a list of points from 0 to 1, on the pad with the mouse or a finger, beside a second one."""
    page.get_by_label("Drawing pad").scroll_into_view_if_needed()
    box = page.get_by_label("Drawing pad").bounding_box()
    finger = page.context.new_cdp_session(page)

    def send(kind, points):
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    for stroke in strokes:
        (x, y), *more = [(box["x"] + right * box["width"], box["y"] + down * box["height"]) for right, down in stroke]
        if touch:
            others = [{"x": box["x"] + right * box["width"], "y": box["y"] + 9, "id": 1} for right in second]
            send("touchStart", [{"x": x, "y": y, "id": 0}])
            send("touchStart", [{"x": x, "y": y, "id": 0}, *others])
            for x, y in more:
                send("touchMove", [{"x": x, "y": y, "id": 0}, *({**other, "y": y} for other in others)])
            send("touchEnd", [])
        else:
            page.mouse.move(x, y)
            page.mouse.down()
            for x, y in more:
                page.mouse.move(x, y, steps=5)
            page.mouse.up()


CROSS = [(0.5, 0.1), (0.5, 0.9)], [(0.1, 0.5), (0.9, 0.5)]
BOX = ([(0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8), (0.2, 0.2)],)
STRIP = "canvas => canvas.toDataURL()"


def test_signs_are_taught_named_and_undone_offline(page):
    loaded = len(page.requests)
    teach, answer = page.get_by_role("button", name="Teach this sign"), page.locator("#sign-answer")
    draw(page, *CROSS)
    page.get_by_label("Name").fill("cross")
    teach.click()
    draw(page, *BOX, touch=True)
    page.get_by_label("Name").fill("box")
    page.keyboard.press("Enter")
    page.get_by_label("Column of the fast matrix for box").wait_for()

    draw(page, [(0.45, 0.2), (0.5, 0.8)], [(0.2, 0.45), (0.8, 0.5)])
    answer.filter(has_text="This is cross").wait_for()
    before = page.get_by_label("Column of the fast matrix for cross").evaluate(STRIP)
    page.get_by_role("button", name="Teach the drawing as cross").click()
    page.get_by_role("button", name="Undo cross").click()
    page.get_by_role("button", name="Undo box").wait_for()
    assert page.get_by_label("Column of the fast matrix for cross").evaluate(STRIP) == before

    pad = page.get_by_label("Drawing pad")
    pad.focus()
    for key in ("ArrowUp", "ArrowLeft", " ", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
        for _ in range(1 if key == " " else 4):
            pad.press(key if key == " " else f"Shift+{key}")
    answer.filter(has_text="This is box").wait_for()

    page.get_by_role("button", name="Clear").click()
    pad.press("Control+z")
    page.get_by_role("button", name="Undo cross").wait_for()
    page.get_by_role("button", name="Forget all").click()
    page.get_by_role("button", name="Teach it five Greek letters").click()
    page.get_by_label("Column of the fast matrix for xi").wait_for()
    assert len(page.requests) == loaded


def test_names_of_spaces_a_sign_too_many_and_a_second_finger_change_nothing(page):
    pad, name = page.get_by_label("Drawing pad"), page.get_by_label("Name")
    for label in ("  ", *(f"n{number}" for number in range(31))):
        pad.press(" ")  # a dot
        name.fill(label)
        name.press("Enter")
    page.get_by_text("It has room for 30 signs").wait_for()
    assert page.locator("#classes .name").all_inner_texts() == [f"n{number}" for number in range(30)]

    pictures = []
    for second in ((), (0.9,)):
        page.get_by_role("button", name="Clear").click()
        draw(page, [(0.2, 0.2), (0.4, 0.4), (0.4, 0.8)], touch=True, second=second)
        pictures.append(pad.evaluate(STRIP))
    assert pictures[0] == pictures[1]


def test_a_typed_line_fills_the_memory_and_is_answered_offline(page, address):
    page.get_by_text("It answers e").wait_for()
    line = page.get_by_role("textbox", name="Line")
    line.fill("S(ab,c),S(dgf,e),")
    page.get_by_text("Nothing is asked here").wait_for()
    first = page.get_by_label("Second fast matrix").evaluate(STRIP)
    line.press_sequentially("S(ab,h),Q(ab)")
    page.get_by_text("It answers h").wait_for()
    page.locator("#stored").get_by_text("ab → h").wait_for()
    assert page.get_by_label("Second fast matrix").evaluate(STRIP) != first
    page.get_by_label("Characters read").press("Home")
    page.get_by_text("Nothing has been read").wait_for()
    line.fill("S(ab,z)")
    page.get_by_role("alert").get_by_text("never seen “z”").wait_for()
    assert all(request.startswith((address, "data:")) for request in page.requests)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.get_by_role("button", name="Teach it five Greek letters").click()
    page.get_by_label("Column of the fast matrix for xi").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
