"""A package `vllm` whose command line serves over HTTP as far as a benchmark asks it to."""

from __future__ import annotations

from pathlib import Path

_MAIN = """
import http.server, json, os, subprocess, sys, threading

words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
print("the fake is told", *words, flush=True)
if "--fail" in words:
    sys.exit("no such model")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
seen = set()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def say(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/v1/models":
            self.say(json.dumps({"data": [{"id": "fake"}], "child": child.pid}))
        else:
            label = 'block_size="16",num_gpu_blocks="%s"' % value("--num-gpu-blocks-override")
            self.say("# HELP\\nvllm:cache_config_info{engine=\\"0\\",%s} 1.0\\n" % label)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["prompt"]
        if len(prompt) > int(value("--max-model-len")) or "--refuse" in words:
            self.say("too long", 400)
            return
        count = asked["max_tokens"]
        found = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in seen), default=0)
        seen.add(tuple(prompt))
        lines = [{"choices": [{"text": "x"}]}] * count
        details = {"cached_tokens": found}
        usage = {"completion_tokens": count, "prompt_tokens_details": details}
        lines.append({"choices": [], "usage": usage})
        self.say("".join("data: %s\\n\\n" % json.dumps(line) for line in lines) + "data: [DONE]\\n")


address = value("--host"), int(value("--port"))
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


def write(folder: Path) -> Path:
    """Make the package below a folder, which is to be put on PYTHONPATH; returns the package's."""
    package = folder / "vllm"
    (package / "entrypoints/cli").mkdir(parents=True)
    for init in (package, package / "entrypoints", package / "entrypoints/cli"):
        (init / "__init__.py").touch()
    (package / "entrypoints/cli/main.py").write_text(_MAIN)
    return package


def add_connectors(package: Path) -> None:
    """What shows that a release has both connectors."""
    connectors = package / "distributed/kv_transfer/kv_connector/v1"
    for file, text in (
        (package / "envs.py", "VLLM_USE_SIMPLE_KV_OFFLOAD"),
        (package / "engine/arg_utils.py", '"--kv-offloading-size"'),
        (connectors / "simple_cpu_offload_connector.py", ""),
        (connectors / "offloading_connector.py", ""),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
