"Chromium without a window, over its debugging pipe: one process for all pages."
import json
import os
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "hide-scrollbars",
           "disable-component-update", "disable-sync", "remote-debugging-pipe")


class Browser:
    "One tab. `noted` holds what it reported since the page was opened: exceptions, words of the console, requests."
    def __init__(self, profile):
        (commands, self.write), (self.read, answers) = os.pipe(), os.pipe()

        def pipes():  # the browser reads number 3 and writes number 4
            held = os.dup(commands), os.dup(answers)
            for number, pipe in zip((3, 4), held): os.dup2(pipe, number)

        self.process = subprocess.Popen(
            [CHROMIUM, *(f"--{option}" for option in OPTIONS), f"--user-data-dir={profile}", "about:blank"],
            close_fds=False, preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(answers)
        self.buffer, self.count, self.session, self.noted = b"", 0, {}, []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]}
        for domain in "Page", "Runtime", "Log", "Network": self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.buffer:
            part = os.read(self.read, 2**16)
            if not part: raise EOFError("the browser has ended")
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method, **parameters):
        "The result of a command of the DevTools protocol."
        self.count += 1
        command = {"id": self.count, "method": method, "params": parameters} | self.session
        os.write(self.write, json.dumps(command).encode() + b"\0")
        while (answer := self.message()).get("id") != self.count: self.noted.append(answer)
        if "error" in answer: raise ValueError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address, width, height, dark=False):
        "Open a page in a window of a size in pixels, and wait until it is loaded."
        self.noted = []
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        while not any(said.get("method") == "Page.loadEventFired" for said in self.noted):
            self.noted.append(self.message())

    def value(self, expression):
        "What a JavaScript expression, or the promise that it gives, is worth."
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer: raise ValueError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wrong(self):
        "What went wrong on the page, and what it wanted from elsewhere than the disk."
        kinds = "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"
        said = [str(x["params"]) for x in self.noted if x.get("method") in kinds]
        asked = [x["params"]["request"]["url"] for x in self.noted if x.get("method") == "Network.requestWillBeSent"]
        return said + [url for url in asked if not url.startswith(("file:", "data:"))]

    def close(self):
        self.session = {}
        self.call("Browser.close")
        self.process.wait(30)
        os.close(self.read), os.close(self.write)
