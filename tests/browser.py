"""Chromium for tests of the console: the system's own, driven by Playwright; where either is missing, tests skip."""

from __future__ import annotations

import contextlib
import shutil
from urllib.parse import urlsplit

import pytest

ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
"""Containers give neither what the sandbox needs nor much shared memory."""
SCHEMES = ("light", "dark")
WIDTHS = (1400, 400)


def chromium() -> str:
    """Path of the browser. Skips where there is none, or no driver."""
    pytest.importorskip("playwright", reason="no playwright, which drives the browser")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    return path


class Watch:
    """What a page did that a reader does not see: errors, requests, dialogs."""

    def __init__(self, page, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.urls: list[str] = []
        self.dialogs: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Texts of errors that the test provokes."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._request)
        page.on("dialog", lambda dialog: self.dialogs.append(dialog.message))

    def _console(self, message) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in self.expected):
            self.errors.append(message.text)

    def _request(self, request) -> None:
        self.urls.append(request.url)
        if not request.url.startswith(("blob:", "data:")) and urlsplit(request.url).netloc != self._host:
            self.elsewhere.append(request.url)

    def check(self) -> None:
        """Nothing went wrong unseen, and nothing was asked of another host."""
        assert (self.errors, self.elsewhere, self.dialogs) == ([], [], [])


@contextlib.contextmanager
def launched():
    """A browser, for tests without an event loop."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


FAULTS_OF_LAYOUT = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) found.push(`the page is ${wide} points too wide`);
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const part = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || seen.has(element)) continue;
    if (element.closest("noscript, [disabled]")) continue;
    seen.add(element);
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || getComputedStyle(element).visibility === "hidden" || box.right < 0) continue;
    const [one, two] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    const name = `${element.tagName} ${element.textContent.trim().slice(0, 30)}`;
    if (contrast < 4.5) found.push(`${name}: contrast ${contrast.toFixed(2)}`);
    if (parseFloat(getComputedStyle(element).fontSize) < 12) found.push(`${name}: small letters`);
    if (box.right > innerWidth + 1 && !element.closest(".scroll, dialog, .skip")) found.push(`${name}: is cut`);
  }
  const boxes = [...document.querySelectorAll("button, a, input, select, textarea, summary")]
    .filter((each) => each.offsetParent && !each.matches(".skip")).map((each) => [each, each.getBoundingClientRect()]);
  for (const [one, a] of boxes) for (const [two, b] of boxes) {
    if (one === two || one.contains(two) || two.contains(one)) continue;
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 1) found.push(`${one.textContent} lies over ${two.textContent}`);
  }
  for (const each of document.querySelectorAll("input, select, textarea")) {
    if (!each.labels?.length && !each.getAttribute("aria-label")) found.push(`${each.id}: no label`);
  }
  for (const each of document.querySelectorAll("canvas")) {
    if (each.offsetParent && !each.getAttribute("aria-label")) found.push("a picture without words");
  }
  return found;
}"""
"""Faults that a look at the page would find: too wide, cut, overlapping, too faint, too small, without a label."""

FOCUSED = """() => {
  const at = document.activeElement;
  const style = getComputedStyle(at);
  const box = at.getBoundingClientRect();
  return {name: at.id || at.textContent.trim(), tag: at.tagName,
    shown: parseFloat(style.outlineWidth) >= 2 && style.outlineStyle !== "none",
    seen: box.right > 0 && box.bottom > 0 && box.width > 0};
}"""
"""The element with the focus, and whether a reader sees that it has it."""
