"""A server that speaks the endpoints of the Hugging Face hub that a download uses, over repositories in memory."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """Files of one repository. ``refs``: {branch: commit}; every commit has the same files unless ``commits`` says."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


@dataclass
class Hub:
    """What the server has, what it was asked, and how it fails.

    ``cut``: {file: bytes after which a response ends}, each once. ``damage``: files whose first byte is wrong, once.
    ``files``: {path: content} of a plain web server.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_right"
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut: dict[str, list[int]] = field(default_factory=dict)
    damage: set[str] = field(default_factory=set)
    endpoint: str = ""
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, directory: Path, *, files: dict[str, bytes] | None = None, gated: bool = False) -> str:
        """Publish the files of a directory, and ``files``, as the newest commit of `main`; returns the commit."""
        content = {file.name: file.read_bytes() for file in sorted(directory.iterdir()) if file.is_file()}
        content |= files or {}
        return self._publish(name, content, gated)

    def add_dataset(self, name: str, files: dict[str, bytes], *, gated: bool = False) -> str:
        """Publish ``files`` as the newest commit of `main` of a dataset; returns the commit."""
        return self._publish(f"datasets/{name}", files, gated)

    def _publish(self, name: str, content: dict[str, bytes], gated: bool) -> str:
        digest = hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(content.items())))
        repository = self.repositories.setdefault(name, Repository({}, {}, gated))
        repository.commits[digest.hexdigest()] = content
        repository.refs["main"] = digest.hexdigest()
        return digest.hexdigest()

    def downloads(self) -> list[str]:
        """The files whose contents were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".parquet", ".gz"))


def etag_of(name: str, data: bytes) -> str:
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    do_HEAD = do_GET

    def do_POST(self):
        self.posted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path in self.hub.files:
            return self.send_file(path, self.hub.files, "")
        parts = path.strip("/").split("/")
        api = parts[:2] in (["api", "models"], ["api", "datasets"])
        kind = "datasets/" if "datasets" in parts[:2] else ""
        parts = parts[1:] if kind and not api else parts
        name = kind + "/".join(parts[2:4] if api else parts[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.refuse(401, "RepoNotFound", "Repository Not Found")
        if repository.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo", "Access is restricted")
        rest = parts[4:] if api else parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound", "Revision Not Found")
        files = repository.commits[commit]
        if not api:
            return self.send_file("/".join(rest[2:]), files, commit)
        if rest and rest[0] == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["False"])[0].lower() == "true"
            return self.send_tree("/".join(rest[2:]), files, recursive)
        if rest and rest[0] == "paths-info":
            return self.send_json(
                [self.describe(path, files) for path in self.posted["paths"] if self.is_there(path, files)]
            )
        siblings = [{"rfilename": n, "size": len(d), "blobId": etag_of(n, d)} for n, d in files.items()]
        self.send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def is_there(self, path, files):
        return path in files or any(name.startswith(f"{path}/") for name in files)

    def describe(self, path, files):
        return self.entry(path, files[path]) if path in files else {"type": "directory", "path": path, "oid": "0" * 40}

    def send_tree(self, folder, files, recursive):
        if folder and not self.is_there(folder, files):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        start = f"{folder}/" if folder else ""
        inside = [name for name in files if name.startswith(start)]
        folders = {str(parent) for name in inside for parent in PurePosixPath(name).parents} - {".", folder}
        found = sorted({*inside, *folders})
        direct = [path for path in found if recursive or "/" not in path.removeprefix(start)]
        self.send_json([self.describe(path, files) for path in direct])

    def entry(self, name, data):
        large = {"lfs": {"oid": etag_of(name, data), "size": len(data), "pointerSize": 130}} if is_large(name) else {}
        return {"type": "file", "path": name, "size": len(data), "oid": etag_of("text", data), **large}

    def send_file(self, name, files, commit):
        if name not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = files[name]
        start, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, whole = int(start), len(data)
        data = data[: int(end) + 1] if end else data
        self.send_response(206 if start or end else 200)
        self.send_header("ETag", f'"{etag_of(name, data)}"')
        self.send_header("X-Repo-Commit", commit)
        if is_large(name):
            self.send_header("X-Linked-Etag", f'"{etag_of(name, data)}"')
            self.send_header("X-Linked-Size", str(whole))
        if start or end:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{whole}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.damage:
            self.hub.damage.discard(name)
            data = bytes([data[0] ^ 1]) + data[1:]
        if self.hub.cut.get(name):
            self.wfile.write(data[start : start + self.hub.cut[name].pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def send_json(self, value, status=200, headers=()):
        body = dumps(value).encode()
        self.send_response(status)
        for name, text in (*headers, ("Content-Type", "application/json")):
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.send_json({"error": message}, status, [("X-Error-Code", code), ("X-Error-Message", message)])


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Start the server on a free port, in a thread; ``hub.endpoint`` then says where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
