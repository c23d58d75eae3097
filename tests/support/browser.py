"""A headless Chromium, driven over its own pipe: what a page does in a real browser."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile

WAIT_S = 60.0
PLACES = ("/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")


def chromium():
    """The path of a Chromium, or None."""
    return next((found for name in PLACES if (found := shutil.which(name))), None)


class Browser:
    """One Chromium for many pages."""

    def __init__(self):
        self._folder = tempfile.mkdtemp(prefix="hotlap-browser-")
        ours, theirs = os.pipe(), os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions"
        flags += " --disable-background-networking --disable-component-update --disable-sync --disable-default-apps"
        line = f'exec "$0" {flags} --user-data-dir="$1" --remote-debugging-pipe 3<&{ours[0]} 4>&{theirs[1]}'
        command = ["bash", "-c", line, chromium(), self._folder]
        self._process = subprocess.Popen(
            command, pass_fds=(ours[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._left, self._number = b"", 0
        self.events = []

    def call(self, method, session=None, **parameters):
        """Send a command, and wait for its answer; events meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (found := self._read()).get("id") != self._number:
            self.events.append(found)
        assert "error" not in found, found
        return found["result"]

    def wait_for(self, method, session):
        """Wait for an event of a page."""
        while True:
            for at, event in enumerate(self.events):
                if event.get("method") == method and event.get("sessionId") == session:
                    del self.events[at]
                    return event
            self.events.append(self._read())

    def _read(self):
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], WAIT_S)
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._left += piece
        line, _, self._left = self._left.partition(b"\0")
        return json.loads(line)

    def page(self, address, *, width=1200, height=900, dark=False, media=""):
        """Open a page in a window of this size."""
        return Page(self, address, width=width, height=height, dark=dark, media=media)

    def close(self):
        """End it."""
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """An open page, with all that it asked for and complained of."""

    def __init__(self, browser, address, *, width, height, dark, media):
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        browser.events.clear()
        self.call("Page.navigate", url=address)
        browser.wait_for("Page.loadEventFired", self._session)
        self.run("new Promise(done => setTimeout(done, 50))")

    def call(self, method, **parameters):
        """A command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def run(self, code):
        """The value of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    @property
    def complaints(self):
        """Errors and lines on the console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self._own() if event["method"] in kinds]

    @property
    def requests(self):
        """The addresses that the page asked for, but for data within it."""
        sent = [one["params"]["request"]["url"] for one in self._own() if one["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]

    def key(self, name, code):
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text)

    def picture(self, path, *, whole=True):
        """Write a picture of the page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _own(self):
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
