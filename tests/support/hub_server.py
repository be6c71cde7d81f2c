"""A Hub on this machine: the HTTP endpoints that uploading, listing and downloading models use, with git's and LFS's rules.

    with HubServer() as hub:
        subprocess.run(..., env={"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"})
        hub.files("me/model")   # path -> bytes

Large files are LFS objects: they go to another URL than the commit and are verified by their SHA-256; a commit that names an
object that was not uploaded is refused, as is a card whose metadata the Hub would not take.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from hub_metadata import card_errors

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
USER = "tester"


@dataclass
class Repository:
    """Commits by id, each a whole tree; branches by name."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, tree: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = tree
        self.messages.append(message)
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None


class HubServer:
    """Runs in a thread between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self.token = "hf_" + "x" * 8  # shorter than a real one, so that it is no secret in anybody's scan
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[revision]]

    def environment(self, home: str) -> dict[str, str]:
        """Variables that make huggingface_hub talk to this server and to nobody else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "CI": "1",
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *args) -> None:
        """Silence: the requests are kept in `HubServer.requests`."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        self._route()

    def do_DELETE(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.server_hub
        hub.requests.append(f"{self.command} {path}")
        for method, pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split():
                with hub.lock:
                    handler(self, hub, **match.groupdict())
                return
        self._error(404, "EntryNotFound", f"no such endpoint: {self.command} {path}")

    def _send(self, status: int, content: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _error(self, status: int, code: str, message: str) -> None:
        content = json.dumps({"error": message}).encode()
        self._send(status, content, "application/json", X_Error_Code=code, X_Error_Message=message)

    def _may_write(self, hub: HubServer) -> bool:
        if self.headers.get("Authorization") == f"Bearer {hub.token}":
            return True
        self._error(401, "Unauthorized", "Invalid username or password.")
        return False

    def _repository(self, hub: HubServer, repo: str) -> Repository | None:
        found = hub.repositories.get(repo)
        if found is None or (found.private and self.headers.get("Authorization") != f"Bearer {hub.token}"):
            self._error(404, "RepoNotFound", f"Repository not found: {repo}")
            return None
        return found

    # ---- endpoints ----

    def whoami(self, hub: HubServer) -> None:
        if self._may_write(hub):
            self._json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, hub: HubServer) -> None:
        if not self._may_write(hub):
            return
        request = json.loads(self.body)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        reply = {"url": f"{hub.url}/{repo_id}", "id": repo_id, "name": repo_id}
        if repo_id in hub.repositories:
            self._json(reply | {"error": "You already created this model repo"}, status=409)
            return
        private = request.get("visibility") == "private" or bool(request.get("private"))
        repository = hub.repositories[repo_id] = Repository(private=private)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self._json(reply)

    def validate_yaml(self, hub: HubServer) -> None:
        errors = card_errors(json.loads(self.body)["content"])
        self._json({"errors": [{"message": e} for e in errors], "warnings": []}, status=400 if errors else 200)

    def preupload(self, hub: HubServer, repo: str, revision: str) -> None:
        if not self._may_write(hub) or self._repository(hub, repo) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def lfs_batch(self, hub: HubServer, repo: str) -> None:
        if not self._may_write(hub):
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in hub.objects:
                upload, verify = f"{hub.url}/lfs/{item['oid']}", f"{hub.url}/lfs-verify"
                entry["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, hub: HubServer, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._error(400, "BadRequest", "the content does not have this SHA-256")
            return
        hub.objects[oid] = self.body
        self._send(200, b"", "text/plain")

    def lfs_verify(self, hub: HubServer) -> None:
        request = json.loads(self.body)
        if len(hub.objects.get(request["oid"], b"")) != request["size"]:
            self._error(404, "EntryNotFound", "no such object")
        else:
            self._json({})

    def commit(self, hub: HubServer, repo: str, revision: str) -> None:
        if not self._may_write(hub):
            return
        repository = self._repository(hub, repo)
        if repository is None:
            return
        if revision not in repository.branches:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        tree = dict(repository.commits[repository.branches[revision]])
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in hub.objects:
                    self._error(400, "BadRequest", f"LFS object of {value['path']} was not uploaded")
                    return
                tree[value["path"]] = hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        errors = card_errors(tree["README.md"].decode()) if "README.md" in tree else []
        if errors:
            self._error(400, "BadRequest", f"Invalid metadata in README.md: {'; '.join(errors)}")
            return
        oid = repository.commit(revision, tree, message)
        self._json(
            {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{repo}/commit/{oid}", "hookOutput": ""}
        )

    def info(self, hub: HubServer, repo: str, revision: str = "main") -> None:
        repository = self._repository(hub, repo)
        oid = repository.resolve(revision) if repository else None
        if repository is not None and oid is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif repository is not None:
            siblings = [{"rfilename": name} for name in sorted(repository.commits[oid])]
            self._json(
                {
                    "id": repo,
                    "modelId": repo,
                    "sha": oid,
                    "private": repository.private,
                    "tags": [],
                    "siblings": siblings,
                }
            )

    def tree(self, hub: HubServer, repo: str, revision: str, folder: str = "") -> None:
        repository = self._repository(hub, repo)
        if repository is None:
            return
        files = repository.commits[repository.resolve(revision)]
        inside = {name: content for name, content in files.items() if name.startswith(f"{folder}/" if folder else "")}
        if not inside:
            self._error(404, "EntryNotFound", f"no folder {folder}")
            return
        self._json([{"type": "file", "oid": _etag(c), "size": len(c), "path": n} for n, c in sorted(inside.items())])

    def paths_info(self, hub: HubServer, repo: str, revision: str) -> None:
        repository = self._repository(hub, repo)
        if repository is None:
            return
        wanted = json.loads(self.body)["paths"] if self.body.startswith(b"{") else []
        files = repository.commits[repository.resolve(revision)]
        self._json(
            [{"type": "file", "oid": _etag(files[p]), "size": len(files[p]), "path": p} for p in wanted if p in files]
        )

    def resolve(self, hub: HubServer, repo: str, revision: str, file: str) -> None:
        repository = self._repository(hub, repo)
        if repository is None:
            return
        oid = repository.resolve(revision)
        if oid is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif file not in repository.commits[oid]:
            self._error(404, "EntryNotFound", f"Entry not found: {file}")
        else:
            content = repository.commits[oid][file]
            headers = {"X_Repo_Commit": oid, "ETag": f'"{_etag(content)}"', "Accept_Ranges": "none"}
            self._send(200, content, "application/octet-stream", **headers)


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES = (
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    ("POST", r"/lfs-verify", _Handler.lfs_verify),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
    ("POST", rf"/api/models/{_REPO}/paths-info/{_REVISION}", _Handler.paths_info),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}", _Handler.tree),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}/(?P<folder>.+)", _Handler.tree),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    ("GET HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", _Handler.resolve),
)
