#!/usr/bin/env python3
"""Opens a report page in headless Chromium, phone and desktop, and checks what only a browser shows.

Usage: report_check.py PAGE [PICTURE]. Writes report-{phone,desktop,dark}.png beside PAGE, and the top of the desktop
view to PICTURE. Exit 1 with one line per problem: a blank or cut view, a page wider than its screen, a text too small,
a request to anything but the page. Installs Debian's `chromium` if there is none.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

VIEWS = {"phone": (390, 844, False), "desktop": (1200, 900, False), "dark": (1200, 900, True)}
PICTURE_HEIGHT = 900  # of a page without a reach picture; else down to the end of its key
MAX_PICTURE_BYTES = 250_000
TIMEOUT_S = 60
MIN_FONT_PX = 9.5  # what a text of the page is drawn with, pictures scaled to the screen too
# Texts drawn too small, and tables that reach out of their box. Runs in the browser; the page itself has no script.
MEASURE = """(() => {
  const small = [...document.querySelectorAll('text, p, td, th, code, dd, dt')].filter(e => {
    const box = e.ownerSVGElement;
    const scale = box ? box.getBoundingClientRect().width / box.viewBox.baseVal.width : 1;
    return box?.getBoundingClientRect().width !== 0 && parseFloat(getComputedStyle(e).fontSize) * scale < MIN;
  });
  const page = document.documentElement;
  const end = document.querySelector('.key')?.getBoundingClientRect().bottom || TOP;
  const top = Math.min(Math.ceil(end) + 4, page.scrollHeight);
  return {width: page.scrollWidth, height: page.scrollHeight, top, small: small.map(e => e.textContent.slice(0, 40))};
})()"""


def find_chromium() -> str:
    """The browser's path; installed as root where it is missing."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*sudo, "apt-get", "update", "-qq"], check=True)
    subprocess.run([*sudo, "apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], check=True)
    return "chromium"


class Browser:
    """One tab of headless Chromium, driven over its debugging pipe: no port, no driver program."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._rest = b""
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], TIMEOUT_S)[0]:
                raise RuntimeError(f"Chromium did not answer within {TIMEOUT_S} s")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        received: dict[str, Any] = json.loads(message)
        if received.get("method") == "Network.requestWillBeSent":
            self.requests.append(received["params"]["request"]["url"])
        return received

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, width: int, height: int, dark: bool) -> None:
        """Show url on a screen of that size, in CSS pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def measure(self) -> dict[str, Any]:
        """Size of the page, end of its top part, texts that are too small."""
        expression = MEASURE.replace("MIN", str(MIN_FONT_PX)).replace("TOP", str(PICTURE_HEIGHT))
        value: dict[str, Any] = self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"][
            "value"
        ]
        return value

    def screenshot(self, width: int, height: int) -> Image.Image:
        """The page from its top, beyond the screen's height too."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data)))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended with the block."""
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()

    def on_3_and_4() -> None:  # the numbers that --remote-debugging-pipe uses
        high_read, high_write = os.dup(their_read), os.dup(their_write)
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [find_chromium(), "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        process = subprocess.Popen(
            [*command, "--disable-gpu", "--hide-scrollbars", "--no-first-run"],
            preexec_fn=on_3_and_4,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        try:
            tab = Browser(our_write, our_read)
            yield tab
            tab.call("Browser.close")  # it then ends its own processes
            process.wait(TIMEOUT_S)
        finally:
            process.terminate()
            process.wait()
            os.close(our_write)
            os.close(our_read)


def check_view(name: str, tab: Browser, url: str, folder: pathlib.Path) -> Iterator[str]:
    """Every problem of one view; report-NAME.png and report-NAME-top.png lie in folder afterwards."""
    width, height, dark = VIEWS[name]
    tab.requests.clear()
    tab.open(url, width, height, dark)
    size = tab.measure()
    if size["width"] > width:
        yield f"{name}: the page is {size['width']} px wide on a screen of {width} px"
    for text in size["small"]:
        yield f"{name}: below {MIN_FONT_PX} px: {text!r}"
    for address in tab.requests:
        if address != url and not address.startswith("data:"):
            yield f"{name}: a request left the page: {address}"
    if url not in tab.requests:
        yield f"{name}: the page itself was not requested: the check sees no requests"
    image = tab.screenshot(width, size["height"])
    image.save(folder / f"report-{name}.png")
    image.crop((0, 0, width, size["top"])).save(folder / f"report-{name}-top.png")
    darkest, lightest = image.convert("L").getextrema()
    if image.size[0] != width or lightest - darkest < 128:  # type: ignore[operator]
        yield f"{name}: a blank picture, {image.size}, grey {darkest} to {lightest}"


def save_picture(image_path: pathlib.Path, picture: pathlib.Path) -> Iterator[str]:
    """The top of the desktop view, small enough for a repository."""
    with Image.open(image_path) as image:
        image.convert("RGB").quantize(256).save(picture, optimize=True)
    if picture.stat().st_size > MAX_PICTURE_BYTES:
        yield f"{picture}: {picture.stat().st_size} bytes, at most {MAX_PICTURE_BYTES}"


def main() -> int:
    """Prints every problem."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    page = pathlib.Path(sys.argv[1]).resolve()
    if not page.is_file():
        print(f"{page}: there is no such page")
        return 1
    problems: list[str] = []
    with browser() as tab:
        for name in VIEWS:
            problems += check_view(name, tab, page.as_uri(), page.parent)
    if len(sys.argv) == 3:
        problems += save_picture(page.parent / "report-desktop-top.png", pathlib.Path(sys.argv[2]))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
