"""Reads what a run wrote for Weights & Biases, MLflow and TensorBoard with their own programs, and compares it with `steps.jsonl`.

`python check.py FOLDER`, after

    burn-megatron train run.toml --output.directory FOLDER --log.wandb FOLDER/wandb --log.mlflow FOLDER/mlruns --log.tensorboard FOLDER/tb

A run that was not resumed: W&B has a run of its own for each resumption. `wandb sync` uploads to a server within this program.
Needs `requirements.txt`.
"""

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def number(value):
    return math.nan if value is None else float(value)


def same(one, other):
    return one == other or (isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other))


def expected(folder, in_order=False):
    """The values by name and step. `in_order`: a checkpoint has the step in which it became complete, as W&B wants it."""
    values, last = {}, 0
    for line in open(folder / "steps.jsonl"):
        entry = json.loads(line)
        kind, step = entry.pop("kind"), entry.pop("step")
        last = max(last, step)
        for name, value in entry.items():
            if value is None or isinstance(value, (bool, int, float)):
                values[f"{kind}/{name}", last if in_order else step] = number(value)
    return values


class Recorder(BaseHTTPRequestHandler):
    """What `wandb sync` needs of a server: it is answered that all is well, and what it sends is kept."""

    sent = []
    RUN = {"id": "1", "name": "run", "project": {"id": "1", "name": "project", "entity": {"id": "1", "name": "me"}}}
    ANSWERS = {
        "viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
        "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
        "upsertBucket": {"bucket": RUN, "inserted": True},
        "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
    }

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if "file_stream" in self.path or self.path.startswith("/graphql"):
            self.sent.append(json.loads(body))
        answer = json.dumps({"data": self.ANSWERS}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def of_wandb(folder):
    """Values, configuration, the last value of each name, and the exit code: what `wandb sync` uploads."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    [run] = folder.glob("wandb/wandb/offline-run-*/")
    with tempfile.TemporaryDirectory() as home:
        copy = shutil.copytree(run, Path(home) / run.name, ignore=shutil.ignore_patterns("*.synced", "*.syncstate"))
        address = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {"HOME": home, "WANDB_BASE_URL": address, "WANDB_API_KEY": 40 * "0"}
        sync = [Path(sys.executable).parent / "wandb", "sync", "--yes", copy]
        subprocess.run(sync, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server.shutdown()
    values, config, summary, code = {}, {}, {}, None
    for body in Recorder.sent:
        files = body.get("files") or {}
        for line in files.get("wandb-history.jsonl", {}).get("content", []):
            row = json.loads(line)
            values.update({(name, row["_step"]): number(value) for name, value in row.items() if name[0] != "_"})
        for line in files.get("wandb-summary.json", {}).get("content", []):
            summary = {name: number(value) for name, value in flat(json.loads(line)).items() if name[0] != "_"}
        if sent := (body.get("variables") or {}).get("config"):
            config = {name: value["value"] for name, value in json.loads(sent).items() if name[0] != "_"}
        if body.get("complete"):
            code = body["exitcode"]
    return values, config, summary, code


def of_mlflow(folder):
    """Values, configuration and status. A name has no slash but the first."""
    client = mlflow.MlflowClient((folder / "mlruns").absolute().as_uri())
    [run] = client.search_runs(["0"])
    found = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        found.update({(name, metric.step): metric.value for metric in history})
        last = max(history, key=lambda metric: metric.step)
        assert same(run.data.metrics[name], last.value), name
    return found, run.data.params, run.info.status


def of_tensorboard(folder):
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def flat(config, path=""):
    if not isinstance(config, dict):
        return {path: config}
    parts = [flat(value, f"{path}.{name}" if path else name) for name, value in config.items()]
    return {name: value for part in parts for name, value in part.items()}


def parsed(text):
    """A parameter of MLflow, which is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def compare(what, found, wanted):
    wrong = [f"{key}: {found.get(key)} in place of {wanted.get(key)}" for key in sorted(found.keys() | wanted.keys(), key=str)
             if key not in found or key not in wanted or not same(found[key], wanted[key])]
    print(f"{what}: {len(wanted)} values, {len(wrong)} differ", *wrong[:8], sep="\n    ")
    return not wrong


folder = Path(sys.argv[1])
wanted = expected(folder)
last = {name: value for (name, _), value in sorted(wanted.items(), key=lambda item: item[0][1])}
values, config, summary, code = of_wandb(folder)
of_store, params, status = of_mlflow(folder)
dotted = {(name[0] + "/" + ".".join(name[1:]), step): value for (name, step), value in
          (((key.split("/"), step), value) for (key, step), value in wanted.items())}
right = [
    compare("W&B, history", values, expected(folder, in_order=True)),
    compare("W&B, summary", summary, last),
    compare("MLflow, metrics", of_store, dotted),
    compare("MLflow, parameters, and W&B, configuration", {name: parsed(text) for name, text in params.items()}, flat(config)),
    # Its scalars are of single precision.
    compare("TensorBoard, scalars", of_tensorboard(folder), {key: float(np.float32(value)) for key, value in wanted.items()}),
    compare("ends", {"W&B": code, "MLflow": status}, {"W&B": 0, "MLflow": "FINISHED"}),
]
sys.exit(not all(right))
