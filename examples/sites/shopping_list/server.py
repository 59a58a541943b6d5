"""A shopping list with state: `python server.py --port 8000`, then open http://127.0.0.1:8000/.

GET /api/state reads the state, and PUT /api/state sets it, as copies of a page do; POST /api/reset puts the first one
back, POST /api/change is what the page sends.
"""

import argparse
import copy
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SEED = {
    "items": [
        {"name": "Bread", "number": 1, "done": False},
        {"name": "Eggs", "number": 2, "done": False},
        {"name": "Milk", "number": 1, "done": True},
        {"name": "Rice", "number": 3, "done": False},
        {"name": "Tea", "number": 1, "done": True},
    ]
}
MAX_ITEMS = 6  # what the page shows without scrolling
state = copy.deepcopy(SEED)


def change(order: dict) -> None:
    """Do what a button of the page asks for."""
    items = state["items"]
    chosen = [item for item in items if item["name"] == order["name"]]
    match order["do"]:
        case "add" if not chosen and order["name"].strip() and len(items) < MAX_ITEMS:
            items.append({"name": order["name"].strip(), "number": 1, "done": False})
        case "toggle" if chosen:
            chosen[0]["done"] = not chosen[0]["done"]
        case "more" if chosen:
            chosen[0]["number"] += 1
        case "less" if chosen and chosen[0]["number"] > 1:
            chosen[0]["number"] -= 1
        case "remove" if chosen:
            items.remove(chosen[0])


class Handler(BaseHTTPRequestHandler):
    """Answers one request at a time; head and body leave in one packet."""

    wbufsize = -1

    def do_GET(self) -> None:
        if self.path == "/api/state":
            self.answer(200, json.dumps(state), "application/json")
        elif self.path == "/":
            self.answer(200, (Path(__file__).parent / "index.html").read_text(encoding="utf-8"), "text/html")
        else:
            self.answer(404, "not here", "text/plain")

    def do_PUT(self) -> None:
        state.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(200, "", "text/plain")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/reset":
            state.update(copy.deepcopy(SEED))
        elif self.path == "/api/change":
            change(json.loads(body))
        else:
            return self.answer(404, "not here", "text/plain")
        return self.answer(200, json.dumps(state), "application/json")

    def answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()
